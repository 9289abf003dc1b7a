"""What the trainer, the planner and the config checks need to know of a decoder, read from an HF
`config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.errors import ConfigError, ModelError
from rlhpc.layout.parallel import ParallelLayout, divisors

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes are global (unsharded). `num_experts` 0 means a dense MLP of `intermediate_size`; otherwise every
    layer has that many experts of `moe_intermediate_size` each."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    vocab_size: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied_embeddings: bool
    max_positions: int

    def check_trainer(self, layout: ParallelLayout) -> None:
        """Raises ConfigError where `layout` can't shard this model."""
        _check_divides("tp", layout.tp, "num_attention_heads", self.num_heads)
        _check_kv_heads("tp", layout.tp, self.num_kv_heads)
        _check_divides("pp", layout.pp, "num_hidden_layers", self.num_layers)
        if self.num_experts:
            _check_divides("ep", layout.ep, "num_experts", self.num_experts)
            _check_divides("etp", layout.etp, "moe_intermediate_size", self.moe_intermediate_size)
        else:
            _check_divides("tp", layout.tp, "intermediate_size", self.intermediate_size)

    def check_rollout(self, tp: int, *, expert_parallel: bool = False) -> None:
        """Raises ConfigError where an engine of tensor parallel size `tp` can't shard this model."""
        name = "rollout tensor_model_parallel_size"
        _check_divides(name, tp, "num_attention_heads", self.num_heads)
        _check_kv_heads(name, tp, self.num_kv_heads)
        if self.num_experts and expert_parallel:
            _check_divides(name, tp, "num_experts", self.num_experts)
        elif self.num_experts:
            _check_divides(name, tp, "moe_intermediate_size", self.moe_intermediate_size)
        else:
            _check_divides(name, tp, "intermediate_size", self.intermediate_size)


def _check_divides(name: str, size: int, of: str, total: int) -> None:
    if size < 1 or total % size:
        raise ConfigError(f"{name}={size} must divide {of}={total}; choose {', '.join(map(str, divisors(total)))}")


def _check_kv_heads(name: str, tp: int, kv_heads: int) -> None:
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"{name}={tp} must divide or be a multiple of num_key_value_heads={kv_heads}; "
            f"choose {', '.join(map(str, divisors(kv_heads)))} or a multiple of {kv_heads}"
        )


def refuse(hf_config: HfConfig, key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ModelError unless `key` is absent or has one of the allowed values."""
    if key in hf_config and hf_config[key] not in allowed:
        raise ModelError(
            f"config.json: {key}={hf_config[key]!r} is not supported for {hf_config.get('model_type')}; "
            f"supported: {', '.join(map(repr, allowed))}"
        )


def required(hf_config: HfConfig, *names: str) -> Any:
    """The value of the first name that is present: later ones are what other Transformers versions write."""
    for name in names:
        if hf_config.get(name) is not None:
            return hf_config[name]
    raise ModelError(f"config.json of {hf_config.get('model_type')} lacks {' or '.join(names)}")


def rope_theta(hf_config: HfConfig) -> float:
    """Base of the rotary embedding. Transformers 5 nests it in `rope_parameters`, earlier versions write
    `rope_theta` beside `rope_scaling`. Only the default kind over the whole head is supported."""
    parameters = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or {}
    for where, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise ModelError(f"config.json: {where} of rope_type {kind!r} is not supported; supported: 'default'")
        refuse(value, "partial_rotary_factor", (None, 1, 1.0))
    refuse(hf_config, "partial_rotary_factor", (None, 1, 1.0))
    return float(required({**hf_config, **parameters}, "rope_theta"))


def decoder_facts(hf_config: HfConfig, *, qk_norm: bool) -> ModelFacts:
    """Facts that Llama-like decoders share; refuses, by name, what no family here supports."""
    refuse(hf_config, "hidden_act", ("silu",))
    refuse(hf_config, "use_sliding_window", (None, False))
    refuse(hf_config, "attention_bias", (None, False))
    refuse(hf_config, "quantization_config", (None,))
    hidden, heads = int(required(hf_config, "hidden_size")), int(required(hf_config, "num_attention_heads"))
    experts = int(hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0)
    facts = ModelFacts(
        model_type=str(hf_config["model_type"]),
        num_layers=int(required(hf_config, "num_hidden_layers")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(hf_config.get("num_key_value_heads") or heads),
        head_dim=int(hf_config.get("head_dim") or hidden // heads),
        intermediate_size=int(hf_config.get("intermediate_size") or 0),
        num_experts=experts,
        experts_per_token=int(required(hf_config, "num_experts_per_tok")) if experts else 0,
        moe_intermediate_size=int(required(hf_config, "moe_intermediate_size", "intermediate_size")) if experts else 0,
        norm_topk_prob=bool(hf_config.get("norm_topk_prob", False)),
        vocab_size=int(required(hf_config, "vocab_size")),
        rope_theta=rope_theta(hf_config),
        norm_eps=float(required(hf_config, "rms_norm_eps")),
        qk_norm=qk_norm,
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        max_positions=int(required(hf_config, "max_position_embeddings")),
    )
    if facts.num_heads % facts.num_kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads={facts.num_kv_heads} must divide num_attention_heads={facts.num_heads}"
        )
    if facts.experts_per_token > experts:
        raise ModelError(f"config.json: num_experts_per_tok={facts.experts_per_token} exceeds num_experts={experts}")
    return facts

"""What the trainer, the planner and the config checks need to know of a decoder, read from an HF
`config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from rlhpc.errors import ConfigError, ModelError
from rlhpc.layout.parallel import ParallelLayout, divisors

HfConfig = Mapping[str, Any]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of rotary frequencies (Transformers 5, modeling_rope_utils.py, "llama3"): divided by
    `factor` where the wavelength is above original_positions / low_freq_factor, kept where it is below
    original_positions / high_freq_factor, interpolated in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


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
    rope_scaling: Llama3Scaling | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
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
            for name, size in (("ep", layout.ep), ("etp", layout.etp)):
                if size != 1:
                    raise ConfigError(
                        f"{name}={size} needs a model with experts, this {self.model_type} is dense; set 1"
                    )
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


def _present(hf_config: HfConfig, *names: str) -> str:
    """The first name that has a value: later ones are what other Transformers versions write."""
    for name in names:
        if hf_config.get(name) is not None:
            return name
    raise ModelError(f"config.json of {hf_config.get('model_type')} lacks {' or '.join(names)}")


def _size(hf_config: HfConfig, *names: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    if default is not None and all(hf_config.get(name) is None for name in names):
        return default
    name = _present(hf_config, *names)
    if type(value := hf_config[name]) is not int or value < 1:  # True is an int to isinstance
        raise ModelError(f"config.json: {name}={value!r} must be a whole number of at least 1")
    return value


def _positive(hf_config: HfConfig, name: str) -> float:
    value = hf_config[_present(hf_config, name)]
    if type(value) not in (int, float) or not 0 < value < inf:
        raise ModelError(f"config.json: {name}={value!r} must be a number above 0")
    return float(value)


def _flag(hf_config: HfConfig, name: str) -> bool:
    """False where it is absent or null."""
    value = hf_config.get(name)
    if value not in (None, False, True):
        raise ModelError(f"config.json: {name}={value!r} must be true or false")
    return bool(value)


def rope(hf_config: HfConfig) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling of the rotary embedding. Transformers 5 nests them in `rope_parameters`, earlier versions write
    `rope_theta` beside `rope_scaling`. Only rotation of the whole head is supported."""
    parameters = dict(hf_config)
    for where in ("rope_scaling", "rope_parameters"):
        given = hf_config.get(where) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json: {where}={given!r} must be an object, such as {{'rope_type': 'default'}}")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ModelError(
                f"config.json: {where} of rope_type {kind!r} is not supported; supported: 'default', 'llama3'"
            )
        parameters |= given
    refuse(parameters, "partial_rotary_factor", (None, 1, 1.0))
    theta = _positive(parameters, "rope_theta")
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return theta, None
    return theta, Llama3Scaling(
        factor=_positive(parameters, "factor"),
        low_freq_factor=_positive(parameters, "low_freq_factor"),
        high_freq_factor=_positive(parameters, "high_freq_factor"),
        original_positions=_size(parameters, "original_max_position_embeddings"),
    )


def decoder_facts(
    hf_config: HfConfig,
    *,
    sparse: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    norm_topk_prob: bool | None = None,
) -> ModelFacts:
    """Facts that Llama-like decoders share; refuses, by name, what no family here supports. `sparse`: every MLP is a
    mixture of experts. `norm_topk_prob`: None where config.json tells."""
    refuse(hf_config, "hidden_act", ("silu",))
    refuse(hf_config, "use_sliding_window", (None, False))
    refuse(hf_config, "quantization_config", (None,))
    if not qkv_bias:  # where a family always has them, config.json needn't tell
        refuse(hf_config, "attention_bias", (None, False))
    kinds = hf_config.get("layer_types") or []
    if unknown := [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "full_attention"]:
        raise ModelError(
            f"config.json: layer_types {', '.join(sorted(set(map(str, unknown))))} not supported; "
            "supported: full_attention"
        )
    hidden, heads = _size(hf_config, "hidden_size"), _size(hf_config, "num_attention_heads")
    experts = _size(hf_config, "num_experts", "num_local_experts") if sparse else 0
    theta, scaling = rope(hf_config)
    facts = ModelFacts(
        model_type=str(hf_config["model_type"]),
        num_layers=_size(hf_config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(hf_config, "num_key_value_heads", default=heads),
        head_dim=_size(hf_config, "head_dim", default=hidden // heads),
        intermediate_size=0 if sparse else _size(hf_config, "intermediate_size"),
        num_experts=experts,
        experts_per_token=_size(hf_config, "num_experts_per_tok") if sparse else 0,
        moe_intermediate_size=_size(hf_config, "moe_intermediate_size", "intermediate_size") if sparse else 0,
        norm_topk_prob=_flag(hf_config, "norm_topk_prob") if norm_topk_prob is None else norm_topk_prob,
        vocab_size=_size(hf_config, "vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(hf_config, "rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=_flag(hf_config, "tie_word_embeddings"),
        max_positions=_size(hf_config, "max_position_embeddings"),
    )
    if facts.num_heads % facts.num_kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads={facts.num_kv_heads} must divide num_attention_heads={facts.num_heads}"
        )
    if facts.experts_per_token > experts:
        raise ModelError(f"config.json: num_experts_per_tok={facts.experts_per_token} exceeds num_experts={experts}")
    if facts.experts_per_token == 1 and facts.norm_topk_prob:
        raise ModelError(
            "config.json: num_experts_per_tok=1 is not supported where routing weights are renormalised: the only "
            "weight is always 1, so routers get no gradient; set at least 2, or norm_topk_prob=false where there is one"
        )
    return facts

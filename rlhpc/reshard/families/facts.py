"""What the trainer, the planner and the config checks need to know of a decoder, read from an HF
`config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

from rlhpc.errors import ConfigError, ModelError
from rlhpc.layout.parallel import ParallelLayout, divisors
from rlhpc.reshard.families.quantised import fp8_block

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
class YarnScaling:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071): divided by `factor` where a head's pair turns less than
    `slow_turns` times over `original_positions`, kept where it turns more than `fast_turns` times, interpolated in
    between by the pair's number. Attention scores are multiplied by `temperature`."""

    factor: float
    fast_turns: float
    slow_turns: float
    original_positions: int
    temperature: float


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434 section 2.1): keys and values of a token are projections of
    `kv_rank` numbers, queries of `q_rank` or, where that is None, of the hidden state. A head's query and key are
    `nope_dim` elements and then `rope_dim` rotated ones, the key's rotated ones being the same for all heads; its value
    has `v_dim`. Neighbouring elements are rotated together."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class SigmoidRouting:
    """DeepSeek-V3's choice of experts (arXiv 2412.19437 section 2.1.2): by sigmoid plus a correction bias, within
    `groups_per_token` of `num_groups` groups, those with the best two experts. Weights are sigmoids without the bias,
    renormalised, times `scale`."""

    num_groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class ModelFacts:
    """Sizes are global (unsharded). `num_experts` 0 means a dense MLP of `intermediate_size`; otherwise every
    layer but the first `num_dense_layers` has that many experts of `moe_intermediate_size` each, and where
    `shared_intermediate_size` isn't 0 a dense MLP of that size beside them, which every token goes through.

    `head_dim` is that of queries and keys."""

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
    rope_scaling: Llama3Scaling | YarnScaling | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied_embeddings: bool
    max_positions: int
    num_dense_layers: int = 0
    shared_intermediate_size: int = 0
    sigmoid_routing: SigmoidRouting | None = None  # None: softmax over all experts
    latent: LatentAttention | None = None  # None: grouped-query attention

    @property
    def expert_number_bytes(self) -> int:
        """That an expert's number is kept in."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def routing_bytes(self) -> int:
        """Of a token: the numbers of its experts in all layers."""
        return self.num_layers * self.experts_per_token * self.expert_number_bytes

    @property
    def v_head_dim(self) -> int:
        return self.latent.v_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What queries times keys are multiplied by."""
        temperature = self.rope_scaling.temperature if isinstance(self.rope_scaling, YarnScaling) else 1.0
        return temperature / sqrt(self.head_dim)

    @property
    def dense_mlps(self) -> dict[str, int]:
        """Sizes of the MLPs that every token goes through, by their names in config.json."""
        sizes = {"intermediate_size": self.intermediate_size}
        if self.num_experts:
            sizes = sizes if self.num_dense_layers else {}
            sizes |= {"n_shared_experts * moe_intermediate_size": self.shared_intermediate_size}
        return {name: size for name, size in sizes.items() if size}

    def stage(self, rank: int, pp: int) -> range:
        """The layers of a pipeline stage. The last, which has the head too, gets what equal ones before it leave."""
        size = -(-self.num_layers // pp)
        return range(size * rank, min(size * (rank + 1), self.num_layers))

    @property
    def stage_counts(self) -> list[int]:
        """Numbers of pipeline stages among which every stage gets a layer."""
        return [pp for pp in range(1, self.num_layers + 1) if self.stage(pp - 1, pp)]

    def check_trainer(self, layout: ParallelLayout) -> None:
        """Raises ConfigError where `layout` can't shard this model."""
        _check_divides("tp", layout.tp, "num_attention_heads", self.num_heads)
        _check_kv_heads("tp", layout.tp, self.num_kv_heads)
        if layout.pp not in self.stage_counts:
            raise ConfigError(f"pp={layout.pp} {self.no_stages(layout.pp)}")
        if self.num_experts:
            _check_divides("ep", layout.ep, "num_experts", self.num_experts)
            _check_divides("etp", layout.etp, "moe_intermediate_size", self.moe_intermediate_size)
        else:
            for name, size in (("ep", layout.ep), ("etp", layout.etp)):
                if size != 1:
                    raise ConfigError(
                        f"{name}={size} needs a model with experts, this {self.model_type} is dense; set 1"
                    )
        for name, size in self.dense_mlps.items():
            _check_divides("tp", layout.tp, name, size)

    def no_stages(self, pp: int) -> str:
        """Why there can't be `pp` pipeline stages, and how many there can be."""
        size, choices = len(self.stage(0, pp)), ", ".join(map(str, self.stage_counts))
        each = f"{size} layer{'s' if size > 1 else ''}"
        return f"stages of {each} leave none of num_hidden_layers={self.num_layers} to the last; choose {choices}"

    def check_rollout(self, tp: int, *, expert_parallel: bool = False) -> None:
        """Raises ConfigError where an engine of tensor parallel size `tp` can't shard this model."""
        name = "rollout tensor_model_parallel_size"
        _check_divides(name, tp, "num_attention_heads", self.num_heads)
        _check_kv_heads(name, tp, self.num_kv_heads)
        if self.num_experts and expert_parallel:
            _check_divides(name, tp, "num_experts", self.num_experts)
        elif self.num_experts:
            _check_divides(name, tp, "moe_intermediate_size", self.moe_intermediate_size)
        for of, size in self.dense_mlps.items():
            _check_divides(name, tp, of, size)


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


def whole_number(hf_config: HfConfig, *names: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    if default is not None and all(hf_config.get(name) is None for name in names):
        return default
    name = _present(hf_config, *names)
    if type(value := hf_config[name]) is not int or value < 1:  # True is an int to isinstance
        raise ModelError(f"config.json: {name}={value!r} must be a whole number of at least 1")
    return value


def positive(hf_config: HfConfig, name: str) -> float:
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


def _rope_kind(given: Any) -> Any:
    return given.get("rope_type", given.get("type", "default")) if isinstance(given, Mapping) else None


def rope(
    hf_config: HfConfig, kinds: Sequence[str] = ("default", "llama3")
) -> tuple[float, Llama3Scaling | YarnScaling | None]:
    """Base and scaling of the rotary embedding, which is one of `kinds`. Transformers 5 nests them in
    `rope_parameters`, earlier versions write `rope_theta` beside `rope_scaling`. Only rotation of the whole head is
    supported."""
    parameters = dict(hf_config)
    old, new = hf_config.get("rope_scaling"), hf_config.get("rope_parameters")
    if old and new and _rope_kind(old) != _rope_kind(new):
        raise ModelError(
            f"config.json: rope_scaling={old!r} and rope_parameters={new!r} say different things; remove the wrong one"
        )
    for where in ("rope_scaling", "rope_parameters"):
        given = hf_config.get(where) or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config.json: {where}={given!r} must be an object, such as {{'rope_type': 'default'}}")
        kind = _rope_kind(given)
        if kind not in kinds:
            supported = ", ".join(map(repr, kinds))
            raise ModelError(f"config.json: {where} of rope_type {kind!r} is not supported; supported: {supported}")
        parameters |= given
    refuse(parameters, "partial_rotary_factor", (None, 1, 1.0))
    theta = positive(parameters, "rope_theta")
    kind = _rope_kind(parameters)
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _yarn(parameters)
    return theta, Llama3Scaling(
        factor=positive(parameters, "factor"),
        low_freq_factor=positive(parameters, "low_freq_factor"),
        high_freq_factor=positive(parameters, "high_freq_factor"),
        original_positions=whole_number(parameters, "original_max_position_embeddings"),
    )


def _yarn(parameters: HfConfig) -> YarnScaling:
    """DeepSeek's, whose two mscales are equal: sines and cosines stay as they are."""
    factor, mscale = positive(parameters, "factor"), positive(parameters, "mscale")
    refuse(parameters, "mscale_all_dim", (mscale,))
    refuse(parameters, "truncate", (None, True))
    refuse(parameters, "attention_factor", (None,))
    _present(parameters, "mscale_all_dim")
    return YarnScaling(
        factor=factor,
        fast_turns=positive(parameters, "beta_fast"),
        slow_turns=positive(parameters, "beta_slow"),
        original_positions=whole_number(parameters, "original_max_position_embeddings"),
        temperature=(0.1 * mscale * log(max(factor, 1.0)) + 1.0) ** 2,
    )


def decoder_facts(
    hf_config: HfConfig,
    *,
    sparse: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    norm_topk_prob: bool | None = None,
    rope_kinds: Sequence[str] = ("default", "llama3"),
) -> ModelFacts:
    """Facts that Llama-like decoders share; refuses, by name, what no family here supports. `sparse`: every MLP is a
    mixture of experts. `norm_topk_prob`: None where config.json tells."""
    refuse(hf_config, "hidden_act", ("silu",))
    refuse(hf_config, "use_sliding_window", (None, False))
    fp8_block(hf_config)
    if not qkv_bias:  # where a family always has them, config.json needn't tell
        refuse(hf_config, "attention_bias", (None, False))
    kinds = hf_config.get("layer_types") or []
    if unknown := [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "full_attention"]:
        raise ModelError(
            f"config.json: layer_types {', '.join(sorted(set(map(str, unknown))))} not supported; "
            "supported: full_attention"
        )
    hidden, heads = whole_number(hf_config, "hidden_size"), whole_number(hf_config, "num_attention_heads")
    experts = whole_number(hf_config, "num_experts", "num_local_experts") if sparse else 0
    theta, scaling = rope(hf_config, rope_kinds)
    facts = ModelFacts(
        model_type=str(hf_config["model_type"]),
        num_layers=whole_number(hf_config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole_number(hf_config, "num_key_value_heads", default=heads),
        head_dim=whole_number(hf_config, "head_dim", default=hidden // heads),
        intermediate_size=0 if sparse else whole_number(hf_config, "intermediate_size"),
        num_experts=experts,
        experts_per_token=whole_number(hf_config, "num_experts_per_tok") if sparse else 0,
        moe_intermediate_size=whole_number(hf_config, "moe_intermediate_size", "intermediate_size") if sparse else 0,
        norm_topk_prob=_flag(hf_config, "norm_topk_prob") if norm_topk_prob is None else norm_topk_prob,
        vocab_size=whole_number(hf_config, "vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=positive(hf_config, "rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=_flag(hf_config, "tie_word_embeddings"),
        max_positions=whole_number(hf_config, "max_position_embeddings"),
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

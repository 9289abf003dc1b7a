"""What a microbatch leaves on a rank for its backward, and what the trainer needs beside that. Pure.

Counted tensor by tensor as rlhpc/backends/megatron runs a layer, after arXiv 2205.05198 (section 4: a rank's part under
tensor and sequence parallelism, and what recomputation leaves), which speaks of dense layers with dropout, GELU and
padded sequences. Here tokens are packed, there is no dropout, MLPs are SwiGLU, experts are grouped products over tokens
sorted by expert, attention may be latent, and logits exist in chunks alone. A token keeps, where s is 1 / tp (sequences
are split), H the hidden size, I an MLP's width on a rank, k the experts of a token, b the bytes of an element:

    norms           H s b each for input and output; on a CPU two float32 copies in between
    attention       rotated queries and keys, values, output (b), its log-sum-exp (4)
    dense MLP       5 I b: Megatron's SwiGLU keeps both halves, silu, the other half again, and the product
    experts         k s etp times: H b of the input, 3 I b (on a CPU, where nothing is fused, 5 I), 4 of the weight
    full recompute  H s b a layer, and one whole layer at a time
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import version

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families.facts import ModelFacts

LOGITS_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # alive at once: CHUNK_BYTES of backends/megatron/logprobs.py
# How many tensors of that size are: logits and their gradient; on a CPU also those in float32 on the way between them.
LOGITS_COPIES = {"cpu": 7, "cuda": 2}


@dataclass(frozen=True)
class Microbatch:
    """What a rank's microbatch has at most: tokens, those whose logits are made, and the longest sequence."""

    tokens: int
    predicted: int
    longest: int


@dataclass(frozen=True)
class Activations:
    """Bytes on the rank of a pipeline's stages that needs most.

    `kept` is saved for the backward of all microbatches under way; `head` is what logprobs and their gradient take, and
    `layer` what one layer's backward does, while all of that is still there: never both at once.
    """

    kept: int
    head: int
    layer: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.head, self.layer)


@dataclass(frozen=True)
class LayerBytes:
    """Kept for a token of the whole sequence, by what can be computed again."""

    norms: float
    projections: float
    core_attn: float  # but for its inputs, which stay either way
    mlp: float
    moe: float

    @property
    def total(self) -> float:
        return self.norms + self.projections + self.core_attn + self.mlp + self.moe

    def without(self, parts: Collection[str]) -> float:
        return self.total - self.of(parts)

    def of(self, parts: Collection[str]) -> float:
        return sum({"core_attn": self.core_attn, "mlp": self.mlp, "moe": self.moe}[part] for part in parts)


class Model:
    """A model under a layout, in elements of `itemsize` bytes, on "cpu" or "cuda". `recompute`: the parts of each layer
    that the backward computes again, or "full". `repeats_keys`: attention is given keys and values once a query head.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layout: ParallelLayout,
        itemsize: int,
        device: str,
        *,
        recompute: Collection[str] | str = (),
        repeats_keys: bool = False,
    ) -> None:
        self.facts, self.layout, self.itemsize, self.device = facts, layout, itemsize, device
        self.recompute, self.repeats_keys = recompute, repeats_keys
        self.share = 1 / layout.tp  # of the sequence, where it is split
        self.heads = facts.num_heads // layout.tp
        self.kv_heads = max(1, facts.num_kv_heads // layout.tp)

    def of_training(self, batch: Microbatch, *, head: bool = True) -> Activations:
        """`head`: the last stage makes logprobs, not values."""
        stages = [self._of_stage(batch, stage, head) for stage in range(self.layout.pp)]
        return max(stages, key=lambda stage: stage.peak)

    def of_inference(self, batch: Microbatch) -> int:
        """Without gradients: what a layer makes, then a chunk of logits."""
        facts, last = self.facts, batch.tokens * self.facts.hidden_size * self.itemsize
        layers = {self._sparse(layer) for layer in range(facts.num_layers)}
        most = max(self.layer_bytes(sparse, batch.longest).total for sparse in layers) * batch.tokens
        return int(last + max(most, self._hidden(batch) + LOGITS_COPIES[self.device] * self._chunk(batch) // 2))

    def layer_bytes(self, sparse: bool, longest: int) -> LayerBytes:
        """Of a layer with experts or without, whose sequences have up to `longest` tokens."""
        attention, core = self._latent(longest) if self.facts.latent else self._grouped()
        norms = 2 * self._norm(self.facts.hidden_size, self.share)
        mlp, moe = (0.0, self._experts()) if sparse else (self._mlp(self.facts.intermediate_size), 0.0)
        return LayerBytes(norms, attention, core, mlp, moe)

    def _of_stage(self, batch: Microbatch, stage: int, head: bool) -> Activations:
        """The schedule is 1F1B: under way are as many microbatches as stages from here on (section 4.2.3)."""
        facts, tokens, size = self.facts, batch.tokens, self.itemsize
        sparse = any(map(self._sparse, facts.stage(stage, self.layout.pp)))
        layers = [self.layer_bytes(self._sparse(layer), batch.longest) for layer in facts.stage(stage, self.layout.pp)]
        hidden = facts.hidden_size * self.share * size
        again: list[float]
        if self.recompute == "full":
            kept, again = hidden * len(layers), [layer.total for layer in layers]
        else:
            kept = sum(layer.without(self.recompute) for layer in layers)
            again = [layer.of(self.recompute) for layer in layers]
        kept += 2 * facts.rope_dim * size + 24  # rotary angles; token ids, positions and their order
        is_last, under_way = stage == self.layout.pp - 1, self.layout.pp - stage
        if is_last:
            kept += self._norm(facts.hidden_size, self.share) - hidden  # which nothing but logprobs takes
        return Activations(
            kept=int(kept * tokens) * under_way + (self._hidden(batch) if is_last else 0),
            head=self._head(batch) if is_last and head else 0,
            layer=int(max(again) * tokens + self._gradients(batch, sparse)),
        )

    def _sparse(self, layer: int) -> bool:
        return self.facts.num_experts > 0 and layer >= self.facts.num_dense_layers

    # --- bytes of a token of the whole sequence

    def _norm(self, size: int, share: float = 1.0) -> float:
        """Input and output; a rank's `share` of the tokens."""
        wide = 4 * size if self.device == "cpu" else 0  # the input over its norm
        of_input = 4 * size if self.device == "cpu" else size * self.itemsize
        return share * (of_input + wide + 4 + size * self.itemsize)

    def _grouped(self) -> tuple[float, float]:
        """Grouped-query attention: (its projections and the norms of heads, what the core keeps itself)."""
        size, b = self.facts.head_dim, self.itemsize
        queries, keys = self.heads * size * b, self.kv_heads * size * b
        output, log_sum_exp = queries, 4 * self.heads
        norms = 0.0
        if self.facts.qk_norm:  # its output is rotated, which keeps nothing
            norms = self._norm(self.heads * size) - queries + 4 * (self.heads - 1)
            norms += self._norm(self.kv_heads * size) - keys + 4 * (self.kv_heads - 1)
            if self.device == "cpu" and b == 4:  # views of what the projection made
                norms -= keys + (queries if self.kv_heads == 1 else 0)
        projected = queries + 2 * keys  # values are a view of it
        if "core_attn" in self.recompute:  # what goes in
            again = queries + keys if self.facts.qk_norm else 0 if self.kv_heads == 1 else queries
            return norms + again + projected + output, queries + keys + output + log_sum_exp
        if self.device == "cpu":
            return norms + projected + output, queries + keys + output + log_sum_exp
        of_keys = queries if self.repeats_keys else keys
        return norms + output, queries + 2 * of_keys + log_sum_exp

    def _latent(self, longest: int) -> tuple[float, float]:
        """Latent attention, as `_grouped`. Values are filled up to the size of keys for CUDA's kernel; on a CPU scores
        of all pairs are made, in float32."""
        latent, b, heads = self.facts.latent, self.itemsize, self.heads
        assert latent is not None
        norms = self._norm(latent.kv_rank, self.share)
        if latent.q_rank is not None:
            norms += self._norm(latent.q_rank, self.share)
        if self.device == "cpu" and b == 4:
            norms += self.share * 4 * latent.rope_dim  # the norm's input is a view
        key_size = latent.nope_dim + latent.rope_dim
        output = heads * latent.v_dim * b
        if "core_attn" in self.recompute:
            values = heads * (latent.nope_dim + latent.v_dim) * b  # a view of what the projection made
            return norms + 2 * heads * key_size * b + values + output, heads * (4.0 * key_size * b + 4)
        if self.device == "cpu":
            return norms + output, heads * 4.0 * (2 * key_size + latent.v_dim + longest)
        return norms + output, heads * (4.0 * key_size * b + 4)

    def _mlp(self, width: int) -> float:
        return 5 * width / self.layout.tp * self.itemsize

    def _experts(self) -> float:
        """With an even load, router and shared experts included."""
        facts, layout, b = self.facts, self.layout, self.itemsize
        times = facts.experts_per_token * self.share * layout.etp
        width = facts.moe_intermediate_size / layout.etp
        fused = 3 if self.device == "cuda" else 5
        routed = times * (facts.hidden_size * b + fused * width * b + 4)
        of_scores = 1 if facts.norm_topk_prob and not facts.sigmoid_routing else 2
        chosen = 52 * facts.experts_per_token + 4 * facts.num_experts * of_scores
        return routed + self.share * chosen + self._mlp(facts.shared_intermediate_size)

    # --- bytes of a microbatch

    def _hidden(self, batch: Microbatch) -> int:
        """Of predicted tokens, with their labels, places and the logprobs' own statistics."""
        return batch.predicted * (self.facts.hidden_size * self.itemsize + 36)

    def _rows(self) -> int:
        return -(-self.facts.vocab_size // self.layout.tp)

    def _chunk(self, batch: Microbatch) -> int:
        """Of logits, in the model's dtype."""
        return min(LOGITS_BYTES[self.device], batch.predicted * self._rows() * self.itemsize)

    def _head(self, batch: Microbatch) -> int:
        """Chunks, the gradients of the output layer (float32, then the dtype) and of the hidden states, those of
        all tokens where sequences are split."""
        weights = self._rows() * self.facts.hidden_size
        narrow = weights * self.itemsize
        rows = batch.predicted + (2 * batch.tokens if self.layout.tp > 1 else 0)
        hidden = rows * self.facts.hidden_size * self.itemsize
        return LOGITS_COPIES[self.device] * self._chunk(batch) + 4 * weights + narrow + hidden

    def _gradients(self, batch: Microbatch, sparse: bool) -> int:
        """What the backward of a layer's MLP makes at once: of its weights, its input and its inner tensors."""
        facts, layout, b = self.facts, self.layout, self.itemsize
        if not sparse:
            width = 3 * facts.intermediate_size // layout.tp
            return int((batch.tokens * (width + facts.hidden_size * self.share)) * b + width * facts.hidden_size * b)
        rows = batch.tokens * facts.experts_per_token * self.share * layout.etp
        width = 2 * facts.moe_intermediate_size // layout.etp
        weights = facts.num_experts // layout.ep * width * facts.hidden_size
        return int((rows * (width + facts.hidden_size) + weights) * b)


def repeats_keys(backend: str) -> bool:
    """Whether attention by `actor.megatron.attention_backend` is given keys and values once a query head: torch's own
    takes groups from 2.13 on. auto is taken for torch's, which needs no less."""
    major, minor = (int(part) for part in version("torch").split(".")[:2])
    return backend != "fused" and (major, minor) < (2, 13)

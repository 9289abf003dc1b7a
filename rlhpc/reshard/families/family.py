"""A model family: its facts, the parts of its layers, and what follows from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Replicas, Shards, ShardSpec
from rlhpc.reshard.families.facts import HfConfig, ModelFacts
from rlhpc.reshard.families.parts import LayerPart, Part
from rlhpc.reshard.families.placement import Placement, Position, Shape, replicated, split

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROUTER = ".gate.weight"  # how the names of routers end in all families
FLOAT32 = (".e_score_correction_bias",)
SCORE = "score.weight"  # a value model's head; Transformers' name for one that classifies
ROLLOUT_VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """The smallest size at least `vocab_size` that both `multiple` and `tp` ranks' equal parts divide."""
    unit = multiple if multiple % tp == 0 else multiple * tp
    return -(-vocab_size // unit) * unit


def _rollout_vocab(vocab_size: int, tp: int) -> int:
    return padded_vocab_size(vocab_size, 1, ROLLOUT_VOCAB_MULTIPLE)


@dataclass(frozen=True)
class Family:
    """Everything that rlhpc knows of one HF `model_type`: its facts, and the parts that each of its layers is made
    of, `dense_layer` being that of the first `num_dense_layers` where the facts have some. Embedding, final norm and
    head are the same in all decoders."""

    model_type: str
    model_facts: Callable[[HfConfig], ModelFacts]
    layer: tuple[LayerPart, ...]
    dense_layer: tuple[LayerPart, ...] = ()

    def layer_parts(self, facts: ModelFacts) -> list[Part]:
        """Every layer as one part; layers of a kind share theirs."""
        first, others = (_whole(makers, facts) for makers in (self.dense_layer, self.layer))
        return [first if layer < facts.num_dense_layers else others for layer in range(facts.num_layers)]

    def canonical_tensors(self, hf_config: HfConfig) -> dict[str, Shape]:
        """HF names and shapes, in the order of the forward pass. Tied embeddings have no head of their
        own."""
        facts = self.model_facts(hf_config)
        tensors: dict[str, Shape] = {EMBED: (facts.vocab_size, facts.hidden_size)}
        for i, layer in enumerate(self.layer_parts(facts)):
            tensors |= {
                f"model.layers.{i}.{name.replace('{e}', str(e))}": shape
                for name, shape in layer.shapes.items()
                for e in (range(facts.num_experts) if "{e}" in name else (0,))
            }
        tensors[NORM] = (facts.hidden_size,)
        if not facts.tied_embeddings:
            tensors[HEAD] = (facts.vocab_size, facts.hidden_size)
        return tensors

    def trainer_specs(self, hf_config: HfConfig, layout: ParallelLayout, dtype: str) -> list[ShardSpec]:
        """Canonical tensors in the Megatron GPTModel's parameters, which are named with layer indices local
        to the pipeline stage. The vocabulary is padded to a multiple of tp (`padded_vocab_size(vocab_size,
        tp)`).

        Raises ModelError (unsupported model) and ConfigError (the layout can't shard it).
        """
        facts = self.model_facts(hf_config)
        facts.check_trainer(layout)
        layers = self.layer_parts(facts)
        shapes = _all_shapes(facts, layers)
        shards: dict[str, Shards] = {}
        ends: dict[str, tuple[Replicas, ...]] = defaultdict(tuple)
        for stage in range(layout.pp):
            positions = _Positions()
            for rank in layout.ranks(pp=stage):
                at = layout.coords(rank)
                positions.add(rank, Position(facts, shapes, at.tp, layout.tp, at.ep, layout.ep, at.etp, layout.etp))
            placed = positions.of_layers([part.trainer for part in layers])
            for local, index in enumerate(facts.stage(stage, layout.pp)):
                buffer = f"decoder.layers.{local}."
                shards |= {f"model.layers.{index}.{name}": Shards(where, buffer) for name, where in placed[index]}
            first, last = stage == 0, stage == layout.pp - 1
            table: dict[str, Placement] = {}
            if first:
                table["embedding.word_embeddings.weight"] = split(EMBED, 0, padded_vocab_size)
            if last:
                table["decoder.final_layernorm.weight"] = replicated(NORM)
                if not facts.tied_embeddings:
                    table["output_layer.weight"] = split(HEAD, 0, padded_vocab_size)
                elif not first:  # Megatron keeps a copy of the tied embedding on the last stage
                    table["output_layer.weight"] = split(EMBED, 0, padded_vocab_size)
            for name, replicas in positions.place(table).items():
                ends[name] += replicas
        shards |= {name: Shards(replicas) for name, replicas in ends.items()}
        return self._specs(hf_config, shards, dtype)

    def critic_tensors(self, hf_config: HfConfig) -> dict[str, Shape]:
        """Those of a value model of this family: one row instead of the vocabulary's head."""
        shapes = self.canonical_tensors(hf_config)
        shapes.pop(HEAD, None)
        return shapes | {SCORE: (1, self.model_facts(hf_config).hidden_size)}

    def critic_specs(self, hf_config: HfConfig, layout: ParallelLayout, dtype: str) -> list[ShardSpec]:
        """As `trainer_specs`, of a value model: every rank of the last stage has the whole row. Raises as it does."""
        specs = {spec.name: spec for spec in self.trainer_specs(hf_config, layout, dtype)}
        specs.pop(HEAD, None)
        kept = (same for same in Shards.of(specs[EMBED].shards).replicas if same.buffer != "output_layer.weight")
        specs[EMBED] = replace(specs[EMBED], shards=Shards(tuple(kept)))
        shape = self.critic_tensors(hf_config)[SCORE]
        row = Replicas(layout.ranks(pp=layout.pp - 1), (0, 0), shape, "output_layer.weight", (0, 0))
        return [*specs.values(), ShardSpec(SCORE, shape, dtype, Shards((row,)))]

    def rollout_specs(
        self, hf_config: HfConfig, tp: int, ranks: Sequence[int], dtype: str, *, expert_parallel: bool = False
    ) -> list[ShardSpec]:
        """Canonical tensors in vLLM's parameters before any post-processing. `ranks` are the world ranks of
        all replicas, `tp` consecutive ones each. With `expert_parallel` the tp ranks hold whole experts, not
        parts.

        Raises ModelError (unsupported model) and ConfigError (`tp` can't shard it).
        """
        facts = self.model_facts(hf_config)
        facts.check_rollout(tp, expert_parallel=expert_parallel)
        if len(ranks) % tp:
            raise ValueError(f"{len(ranks)} rollout ranks are no multiple of tp={tp}")
        layers = self.layer_parts(facts)
        shapes = _all_shapes(facts, layers)
        positions = _Positions()
        for i, rank in enumerate(ranks):
            t = i % tp
            grid = (t, tp, 0, 1) if expert_parallel else (0, 1, t, tp)
            positions.add(rank, Position(facts, shapes, t, tp, *grid))
        shards: dict[str, Shards] = {}
        for index, placed in enumerate(positions.of_layers([part.rollout for part in layers])):
            prefix = f"model.layers.{index}."
            shards |= {prefix + name: Shards(replicas, prefix) for name, replicas in placed}
        ends: dict[str, Placement] = {EMBED: split(EMBED, 0, _rollout_vocab), NORM: replicated(NORM)}
        if not facts.tied_embeddings:
            ends[HEAD] = split(HEAD, 0, _rollout_vocab)
        shards |= {name: Shards(replicas) for name, replicas in positions.place(ends).items()}
        return self._specs(hf_config, shards, dtype)

    def _specs(self, hf_config: HfConfig, shards: Mapping[str, Shards], dtype: str) -> list[ShardSpec]:
        shapes = self.canonical_tensors(hf_config)
        return [ShardSpec(name, shape, tensor_dtype(name, dtype), shards[name]) for name, shape in shapes.items()]


def tensor_dtype(name: str, dtype: str) -> str:
    """That of a canonical tensor in a model of `dtype`: what chooses experts stays float32, as backends and published
    files have it."""
    return "float32" if name.endswith(FLOAT32) else dtype


def _whole(makers: Sequence[LayerPart], facts: ModelFacts) -> Part:
    """A layer's parts as one."""
    shapes: dict[str, Shape] = {}
    trainer: dict[str, Placement] = {}
    rollout: dict[str, Placement] = {}
    for part in (make(facts) for make in makers):
        shapes |= part.shapes
        trainer |= part.trainer
        rollout |= part.rollout
    return Part(shapes, trainer, rollout)


def _all_shapes(facts: ModelFacts, layers: Sequence[Part]) -> dict[str, Shape]:
    vocab = (facts.vocab_size, facts.hidden_size)
    return {**layers[0].shapes, **layers[-1].shapes, EMBED: vocab, HEAD: vocab, NORM: (facts.hidden_size,)}


class _Positions:
    """Ranks by their place in the model-parallel grids: those at the same place hold the same."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._positions: dict[tuple[int, ...], Position] = {}

    def add(self, rank: int, at: Position) -> None:
        place = (at.tp, at.ep, at.etp)
        self._positions.setdefault(place, at)
        self._ranks[place].append(rank)

    def of_layers(self, tables: Sequence[Mapping[str, Placement]]) -> list[ItemsView[str, tuple[Replicas, ...]]]:
        """`place` of each layer's table; equal tables share one result."""
        placed = {id(table): self.place(table) for table in {id(table): table for table in tables}.values()}
        return [placed[id(table)].items() for table in tables]

    def place(self, table: Mapping[str, Placement]) -> dict[str, tuple[Replicas, ...]]:
        """Where the ranks hold each tensor of the table's parameters."""
        found: dict[str, dict[tuple[Shape, Shape, str, Shape], list[int]]] = defaultdict(dict)
        for place, at in self._positions.items():
            for name, placement in table.items():
                for tensor, start, stop, offset in placement(at):
                    found[tensor].setdefault((start, stop, name, offset), []).extend(self._ranks[place])
        return {
            tensor: tuple(Replicas(tuple(sorted(ranks)), *where) for where, ranks in boxes.items())
            for tensor, boxes in found.items()
        }

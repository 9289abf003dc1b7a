"""This rank's training state as boxes of canonical tensors, and back under whatever layout this run has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from rlhpc.backends.megatron.optimizer import MOMENTS, Optimizer
from rlhpc.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from rlhpc.checkpoint.pieces import Index, Piece
from rlhpc.checkpoint.shards import read_rank_state
from rlhpc.errors import CheckpointError, RlhpcError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shards, ShardSpec
from rlhpc.reshard.flat import FlatRange, flat_buffers, flat_specs
from rlhpc.reshard.hf import load_hf
from rlhpc.reshard.saved import WEIGHT_KINDS, Wanted, load_saved, load_together, pieces_of
from rlhpc.train.protocols import TrainerState

MASTER, FROZEN = WEIGHT_KINDS

Buffers = dict[str, torch.Tensor]


class ModelState:
    """Where the masters, moments and frozen parameters of one rank's model lie in the canonical tensors.

    Masters and moments are what the distributed optimizer's flat ranges hold, so that the ranks' boxes make up each
    tensor once (what is whole on each tensor-parallel rank, such as norms, as often as there are of these). Frozen
    parameters have no optimizer state: each is saved by one of the ranks that hold it, and read by all. Padding belongs
    to no box; a load makes it zero.

    `prefix` precedes the names of tensors and scalars in checkpoints.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: Optimizer,
        specs: Sequence[ShardSpec],
        rank: int,
        prefix: str = "",
    ) -> None:
        self._optimizer, self._rank, self._prefix = optimizer, rank, prefix
        specs = [replace(spec, name=prefix + spec.name) for spec in specs]
        self.shapes = {spec.name: spec.shape for spec in specs}
        own = [ShardSpec(s.name, s.shape, s.dtype, shards) for s in specs if (shards := tuple(s.on(rank)))]
        ranges = [
            FlatRange(rank, shard.name, tuple(parameters[shard.name].shape), shard.start, shard.stop)
            for shard in optimizer.shards()
        ]
        self._trained = flat_specs(own, ranges)
        self._buffers: dict[str, Buffers] = {}  # by kind
        for kind in (MASTER, *MOMENTS):
            self._buffers[kind] = flat_buffers(ranges, {shard.name: shard.of(kind) for shard in optimizer.shards()})
        self._buffers[FROZEN] = {name: p.data for name, p in parameters.items() if not p.requires_grad}
        self._frozen = _in_buffers(own, self._buffers[FROZEN])
        self._frozen_saved = _in_buffers(_taking_turns(specs, rank), self._buffers[FROZEN])

    def pieces(self, resident: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """What this rank saves; `resident` says where a tensor's content is now."""
        for kind, specs in [*((kind, self._trained) for kind in (MASTER, *MOMENTS)), (FROZEN, self._frozen_saved)]:
            buffers = {name: resident(tensor) for name, tensor in self._buffers[kind].items()}
            yield from pieces_of(kind, specs, self._rank, buffers)

    @property
    def scalars(self) -> dict[str, int]:
        return {self._step_name: self._optimizer.schedule.num_steps}

    @property
    def _step_name(self) -> str:
        return f"{self._prefix}optimizer_step"

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a load writes into."""
        for shard in self._optimizer.shards():
            yield from (shard.of(kind) for kind in (MASTER, *MOMENTS))
        yield from self._buffers[FROZEN].values()

    def wanted(self) -> Iterator[Wanted]:
        """What a load reads, after making all that it reads into zero."""
        self._zero(MASTER, *MOMENTS)
        for kind in (MASTER, *MOMENTS):
            yield Wanted(kind, self._trained, self._buffers[kind])
        yield Wanted(FROZEN, self._frozen, self._buffers[FROZEN], cast=True)

    def optimizer_step(self, manifest: CheckpointManifest) -> int:
        """The one that all ranks had reached when they wrote the checkpoint."""
        name = self._step_name
        steps = {entry.scalars[name]: entry.rank for entry in manifest.files if name in entry.scalars}
        if len(steps) != 1:
            found = " and ".join(f"{step} (rank {rank})" for step, rank in sorted(steps.items()))
            raise CheckpointError(
                f"{manifest.directory} holds the state after different optimizer steps ({name}): {found or None}"
            )
        return int(next(iter(steps)))

    def go_on_after(self, step: int) -> None:
        """So many optimizer steps were taken."""
        for shard in self._optimizer.shards():
            shard.state["step"].fill_(step)
        self._optimizer.schedule.num_steps = 0
        self._optimizer.schedule.step(increment=step)

    @torch.no_grad()
    def load_weights(self, source: Path) -> None:
        """Masters and frozen parameters alone, of an HF directory or of a committed checkpoint: a master is as exact as
        the source. Afterwards the masters have to be published. Raises ModelError for the former, CheckpointError for
        the latter.
        """
        held = {spec.name: spec for spec in (*self._trained, *self._frozen)}
        buffers = self._buffers[MASTER] | self._buffers[FROZEN]
        self._zero(MASTER)
        if (source / MANIFEST_NAME).exists():
            manifest = read_manifest(source)
            _check(manifest, self.shapes, critic=False)
            load_saved(manifest, WEIGHT_KINDS, held.values(), self._rank, buffers, cast=True)
        else:
            absent = (ShardSpec(name, shape, "float32", ()) for name, shape in self.shapes.items() if name not in held)
            load_hf(source, [*held.values(), *absent], self._rank, buffers)

    def _zero(self, *kinds: str) -> None:
        for shard in self._optimizer.shards():
            for kind in kinds:
                shard.of(kind).zero_()


def saved(models: Sequence[ModelState], resident: Callable[[torch.Tensor], torch.Tensor]) -> TrainerState:
    """What this rank saves of its models and generators; `resident` says where a tensor's content is now."""
    pieces = [piece for model in models for piece in model.pieces(resident)]
    shapes = {name: shape for model in models for name, shape in model.shapes.items()}
    tensors, rng = rng_state()
    scalars: dict[str, Any] = {name: value for model in models for name, value in model.scalars.items()}
    held = {piece.name: shapes[piece.name] for piece, _ in pieces}
    return TrainerState(pieces, held, tensors, scalars | {"rng": rng})


@torch.no_grad()
def load(models: Sequence[ModelState], manifest: CheckpointManifest, layout: ParallelLayout, seed: int) -> None:
    """Masters, moments, frozen parameters, and where schedules and generators stand: the latter begin with `seed` under
    another layout than the writers'. Afterwards the masters have to be published.

    Raises CheckpointError, the state being neither the old nor the new one then.
    """
    _check(manifest, {name: shape for model in models for name, shape in model.shapes.items()})
    steps = [model.optimizer_step(manifest) for model in models]
    load_together(manifest, dist.get_rank(), [wanted for model in models for wanted in model.wanted()])
    for model, step in zip(models, steps, strict=True):
        model.go_on_after(step)
    tensors, scalars = read_rank_state(manifest, dist.get_rank()) if manifest.layout == vars(layout) else ({}, {})
    if tensors and ("rng/cuda" in tensors) == torch.cuda.is_available():
        load_rng_state(tensors, scalars["rng"])
    else:
        seed_rng(seed)


def _check(manifest: CheckpointManifest, shapes: Mapping[str, Index], *, critic: bool = True) -> None:
    """Raises CheckpointError unless the checkpoint is of models with the same tensors; reads nothing."""
    if difference := manifest.other_than(shapes, critic=critic):
        raise CheckpointError(
            f"{manifest.directory} is of another model than this run's: {difference}; resume with the model that "
            "wrote it"
        )


@contextmanager
def told_to_all() -> Iterator[None]:
    """What a rank raises inside is raised on all of them: the others would wait for it in the next collective."""
    failure: tuple[type[RlhpcError], str] | None = None
    try:
        yield
    except RlhpcError as error:
        failure = type(error), str(error)
    failures: list[tuple[type[RlhpcError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if told := [(rank, *each) for rank, each in enumerate(failures) if each]:
        rank, kind, text = told[0]
        raise kind(f"rank {rank}: {text}" + (f"; and {len(told) - 1} more ranks" if len(told) > 1 else ""))


def _in_buffers(specs: Sequence[ShardSpec], buffers: Mapping[str, torch.Tensor]) -> list[ShardSpec]:
    """What of the specs lies in these buffers."""
    held = ((spec, tuple(shard for shard in spec.shards if shard.buffer in buffers)) for spec in specs)
    return [ShardSpec(spec.name, spec.shape, spec.dtype, shards) for spec, shards in held if shards]


def _taking_turns(specs: Sequence[ShardSpec], rank: int) -> list[ShardSpec]:
    """What of the specs this rank saves where each of the ranks that hold the same could."""
    result = []
    for i, spec in enumerate(specs):
        shards = Shards.of(spec.shards)
        mine = tuple(s._replace(ranks=(rank,)) for s in shards.replicas if s.ranks[i % len(s.ranks)] == rank)
        if mine:
            result.append(ShardSpec(spec.name, spec.shape, spec.dtype, Shards(mine, shards.prefix)))
    return result


def rng_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All generators of the process: torch's, CUDA's, Megatron's named streams, numpy's and Python's."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss_next = random.getstate()
    tensors = {
        "rng/torch": torch.get_rng_state(),
        "rng/numpy": torch.from_numpy(keys.astype(np.int64)),
        "rng/python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"rng/megatron/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return tensors, {"numpy": [kind, position, has_gauss, cached], "python": [version, gauss_next]}


def load_rng_state(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["rng/torch"].cpu())
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"].cpu())
    kind, position, has_gauss, cached = scalars["numpy"]
    np.random.set_state((kind, tensors["rng/numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, gauss_next = scalars["python"]
    random.setstate((version, tuple(tensors["rng/python"].tolist()), gauss_next))
    prefix = "rng/megatron/"
    states = {name.removeprefix(prefix): state for name, state in tensors.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(states)


def seed_rng(seed: int) -> None:
    """As at the start of a run: the generators of ranks that stood elsewhere have nothing to hand on."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)

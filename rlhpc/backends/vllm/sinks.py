"""Two ways of published weights into vLLM: regions of its fused parameters, or whole tensors through its own loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import nn

from rlhpc.backends.vllm import private
from rlhpc.errors import EngineError
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families.family import EMBED, HEAD, tensor_dtype


class DirectSink:
    """Writes what a rank needs, and nothing else, into vLLM's parameters: fused qkv, gate and up, stacked experts.

    On CUDA these are the running model's own. On a CPU, where vLLM prepacks weights at load, they are those of a
    second model, which is processed and adopted at the end. Implements `rlhpc.train.protocols.WeightSink`.
    `specs` is the family's rollout layout; raises EngineError where it doesn't fit vLLM's parameters exactly.
    """

    def __init__(self, llm: private.LLM, specs: Sequence[ShardSpec], rank: int) -> None:
        self._llm, self._specs = llm, specs
        self._in_place = private.device(llm).type == "cuda"
        self._target: nn.Module | None = None
        parameters = private.loadable_parameters(self._model())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._padded = check_parameters(specs, rank, shapes)

    def _model(self) -> nn.Module:
        return private.running_model(self._llm) if self._in_place else private.build_model(self._llm)

    def sink_specs(self) -> Sequence[ShardSpec]:
        return self._specs

    def begin_publish(self) -> Mapping[str, torch.Tensor]:
        """This rank's parameters by vLLM's names; vocabulary padding is zero, as vLLM's loader leaves it."""
        self._target = self._model()
        buffers = {name: parameter.data for name, parameter in private.loadable_parameters(self._target).items()}
        for name in self._padded:
            buffers[name].zero_()
        return buffers

    def end_publish(self, policy_version: int) -> None:
        assert self._target is not None, "end_publish without begin_publish"
        target, self._target = self._target, None
        if self._in_place:
            private.renew_derived(self._llm)
            torch.cuda.current_stream().synchronize()  # vLLM may read on another stream; others may go on
        else:
            private.adopt(self._llm, target)


class ReferenceSink:
    """Takes every canonical tensor whole and hands them to vLLM's `load_weights`: what DirectSink is proven against.

    Costs a whole model of memory on every rank, and the traffic for it, but knows nothing of vLLM's layouts.
    Implements `rlhpc.train.protocols.WeightSink`. `specs` are `whole_tensors`.
    """

    def __init__(self, llm: private.LLM, specs: Sequence[ShardSpec]) -> None:
        self._llm, self._specs = llm, specs
        self._tensors: dict[str, torch.Tensor] = {}

    def sink_specs(self) -> Sequence[ShardSpec]:
        return self._specs

    def begin_publish(self) -> Mapping[str, torch.Tensor]:
        """Canonical tensors by name, contents undefined. `end_publish` empties the mapping."""
        device = private.device(self._llm)
        for spec in self._specs:
            self._tensors[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        return self._tensors

    def loaded_model(self) -> nn.Module:
        """A second model that vLLM has loaded the written tensors into, not processed yet; they are freed."""
        model = private.build_model(self._llm)
        loaded = private.load_weights(model, self._tensors)
        self._tensors.clear()
        if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
            raise EngineError(
                f"vllm {private.VERSION} loads {len(missing)} of its parameters from none of the model's canonical "
                f"tensors: {', '.join(missing[:4])}; the family's names don't fit this vLLM"
            )
        return model

    def end_publish(self, policy_version: int) -> None:
        private.adopt(self._llm, self.loaded_model())


def whole_tensors(tensors: Mapping[str, tuple[int, ...]], dtype: str, world_size: int) -> list[ShardSpec]:
    """Every canonical tensor (name to shape) whole on every rank, in a buffer of its own name."""
    ranks = tuple(range(world_size))
    return [ShardSpec.whole(name, shape, tensor_dtype(name, dtype), ranks) for name, shape in tensors.items()]


def check_parameters(specs: Sequence[ShardSpec], rank: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Holds the layout of `rank` against vLLM's parameters (name to shape): the same names, every shard within its
    parameter, no element left over. Returns the parameters with vocabulary padding, the only elements that no shard
    covers; a rank may hold nothing else of one. Raises EngineError naming the parameter."""
    covered = dict.fromkeys((buffer for spec in specs for buffer in spec.buffers), 0)
    if covered.keys() != shapes.keys():
        missing, unknown = sorted(covered.keys() - shapes.keys()), sorted(shapes.keys() - covered.keys())
        raise EngineError(
            f"vllm {private.VERSION} and the family's rollout layout name different parameters: "
            f"only in the layout {missing[:4]}, only in vLLM {unknown[:4]}"
        )
    vocabulary = {buffer for spec in specs if spec.name in (EMBED, HEAD) for buffer in spec.buffers}
    for spec in specs:
        for shard in spec.on(rank):
            shape, end = shapes[shard.buffer], shard.end
            if len(end) != len(shape) or any(e > s for e, s in zip(end, shape, strict=True)):
                raise EngineError(f"vLLM's parameter {shard.buffer} has shape {shape}; {spec.name} ends at {end} in it")
            covered[shard.buffer] += prod(shard.shape)
    padded = [name for name, numel in covered.items() if numel < prod(shapes[name])]
    if lost := [name for name in padded if name not in vocabulary]:
        raise EngineError(
            f"the family's rollout layout fills {covered[lost[0]]} of the {prod(shapes[lost[0]])} elements of vLLM's "
            f"parameter {lost[0]} {shapes[lost[0]]} on rank {rank}; only the vocabulary may have padding"
        )
    return padded

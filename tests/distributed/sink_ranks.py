"""What the ranks of test_sinks.py run: one real engine, its weights published through both sinks by the planner."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.families import family_for
from rlhpc.reshard.plan import plan
from rlhpc.reshard.verify import verify
from tests.distributed import vllm_ranks
from tests.hf_files import read_tensors

BUCKET_BYTES = 64 * 1024


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it torch.empty is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def scattered(weights: Mapping[str, torch.Tensor], world_size: int) -> list[ShardSpec]:
    """The i-th tensor whole on rank i modulo the world, in a buffer of its own name."""
    return [
        ShardSpec(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            (Shard(i % world_size, (0,) * tensor.dim(), tuple(tensor.shape), name, (0,) * tensor.dim()),),
        )
        for i, (name, tensor) in enumerate(weights.items())
    ]


def fill(sink: Any, weights: Mapping[str, torch.Tensor], rank: int) -> Mapping[str, torch.Tensor]:
    """Begins a publish and writes the weights through plan, exchange and verification; returns the sink's buffers."""
    source = scattered(weights, dist.get_world_size())
    copies = plan(source, sink.sink_specs())
    with poisoned_memory():
        buffers = sink.begin_publish()
    mine = {spec.name: weights[spec.name] for spec in source if spec.shards[0].rank == rank}
    Resharder(copies, rank, bucket_bytes=BUCKET_BYTES).run(mine, buffers)
    verify(copies, mine, buffers, rank)
    return buffers


def every_split(
    model_dir: str, splits: Mapping[int, str], prompts: Any, specs: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """`both_sinks` on one engine after the other, for each tensor-parallel size and the sink that it starts with."""
    return {tp: both_sinks(model_dir, tp, prompts, specs, sink) for tp, sink in splits.items()}


def both_sinks(model_dir: str, tp: int, prompts: Any, specs: Mapping[str, Any], configured: str) -> dict[str, Any]:
    """One engine, started with the sink `configured`, gets the weights of `model_dir` through either sink."""
    from rlhpc.backends.vllm.sinks import DirectSink, ReferenceSink, whole_tensors

    hf_config = json.loads(Path(model_dir, "config.json").read_text())
    weights = read_tensors(model_dir)
    with vllm_ranks.engine(model_dir, tp, "rlhpcsinks", sink=configured) as running:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        family = family_for(hf_config)
        rollout = family.rollout_specs(hf_config, tp, range(world_size), "float32")
        whole = whole_tensors(family.canonical_tensors(hf_config), "float32", world_size)
        sinks = {"direct": DirectSink(running._llm, rollout, rank), "reference": ReferenceSink(running._llm, whole)}
        result: dict[str, Any] = {"started with": type(running._sink).__name__, "replica": running.replica_rank}

        direct = {name: buffer.clone() for name, buffer in fill(sinks["direct"], weights, rank).items()}
        handed_out = fill(sinks["reference"], weights, rank)
        with poisoned_memory():
            reference = dict(sinks["reference"].loaded_model().named_parameters())
        result["still held"] = len(handed_out)
        result["names"] = (sorted(direct), sorted(reference))
        result["unequal"] = [
            name
            for name in direct
            if not torch.equal(direct[name].view(torch.uint8), reference[name].view(torch.uint8))
        ]
        result["never written"] = [name for name, buffer in direct.items() if buffer.isnan().any()]
        result["vocabulary"] = direct["model.embed_tokens.weight"].numpy()

        for name, sink in sinks.items():
            for weight in weights.values():  # other weights first, so that a publish that does nothing is seen
                weight.neg_()
            fill(sink, weights, rank)
            running._sink = sink
            running.end_publish(1)
            result[f"{name} negated"] = running.generate(prompts, specs["short"], seed=5)[1]
            for weight in weights.values():
                weight.neg_()
            fill(sink, weights, rank)
            running.end_publish(2)
            result[name] = {
                key: running.generate(prompts, spec, seed=5)[0] for key, spec in specs.items() if key != "short"
            }
        return result


def on_cuda(old: str, new: str, tp: int, dtype: str, prompts: Any, **rollout: Any) -> dict[str, Any]:
    """Generates with the old weights, then publishes all new ones into memory that has slept, once by either sink."""
    from rlhpc.backends.vllm import private
    from rlhpc.backends.vllm.sinks import ReferenceSink, whole_tensors

    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else Triton's float32 products are TF32
    hf_config = json.loads(Path(old, "config.json").read_text())
    with vllm_ranks.engine(old, tp, "rlhpcgpu", device="cuda", dtype=dtype, **rollout) as running:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        models = {
            name: {key: tensor.to("cuda", getattr(torch, dtype)) for key, tensor in read_tensors(path).items()}
            for name, path in (("old", old), ("new", new))
        }
        whole = whole_tensors(family_for(hf_config).canonical_tensors(hf_config), dtype, world_size)
        sinks = {"direct": running._sink, "reference": ReferenceSink(running._llm, whole)}
        result: dict[str, Any] = {"samples": {}}
        parameters: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

        def publish(sink: str, model: str) -> None:
            running.sleep()
            running.wake("weights")
            running._sink = sinks[sink]
            fill(running._sink, models[model], rank)
            running.end_publish(1)
            live = private.running_model(running._llm).named_parameters()
            parameters[sink, model] = {name: parameter.data.cpu() for name, parameter in live}
            running.wake("kv_cache")

        for sink in sinks:
            publish(sink, "old")
            vllm_ranks.raw_generate(running, prompts)
            result["samples"][sink, "old"] = vllm_ranks.raw_generate(running, prompts)  # from the prefix cache
            allocated = torch.cuda.memory_allocated()
            publish(sink, "new")
            result["samples"][sink, "new"] = vllm_ranks.raw_generate(running, prompts)
            result[f"{sink} kept bytes"] = torch.cuda.memory_allocated() - allocated
        for model in models:
            direct, reference = parameters["direct", model], parameters["reference", model]
            result[f"{model} unequal"] = [
                name
                for name in direct
                if not torch.equal(direct[name].view(torch.uint8), reference[name].view(torch.uint8))
            ]
        result["unchanged"] = [
            name
            for name, old in parameters["direct", "old"].items()
            if torch.equal(old, parameters["direct", "new"][name])
        ]
        return result

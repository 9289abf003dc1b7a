"""Causal attention over packed sequences by each backend the trainer can take: TFLOP/s forward and backward, and how
long a batch of a new shape takes the first time.

usage: python -m scripts.bench.attention [--tokens 16384] [--lengths 1024 4096 8192] [--heads 32 --kv-heads 4
           --head-dim 128] [--repeats 20] [--out scripts/bench/results]

Heads are Qwen3-30B-A3B's by default; `mixed` are random lengths up to the first of `--lengths`. FLOPs are of the pairs
of positions that see each other, 4 for each element of a head in the forward and 10 in the backward, which computes the
scores again. Outputs and gradients are compared with float32 ones of `local`. Writes attention-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlhpc.backends.megatron.attention import BACKENDS, PackedAttention, PackedSequences, attention_backend
from rlhpc.data.packing import TokenSequence, pack
from rlhpc.errors import ConfigError
from scripts.bench.machine import RESULTS, hardware, place, versions

Tensors = tuple[torch.Tensor, ...]


def packed(lengths: Sequence[int], head_dim: int, device: torch.device, dtype: torch.dtype) -> PackedSequences:
    sequences = [TokenSequence(i, np.zeros(length, np.int32), 1) for i, length in enumerate(lengths)]
    ((batch,),) = pack(sequences, dp_size=1, max_tokens=sum(lengths))
    frequencies = torch.zeros(head_dim // 2, device=device)  # no rotation: the same for every backend
    batch = replace(batch, input_ids=batch.input_ids.to(device), position_ids=batch.position_ids.to(device))
    return PackedSequences.of(batch, frequencies=frequencies, dtype=dtype)


def inputs(tokens: int, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Query, key, value and the output's gradient."""
    torch.manual_seed(0)
    shapes = [(tokens, n, args.head_dim) for n in (args.heads, args.kv_heads, args.kv_heads)]
    query, key, value = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value, torch.randn(tokens, args.heads * args.head_dim, device=device, dtype=dtype)


def module_of(backend: AttnBackend, args: argparse.Namespace) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.heads * args.head_dim,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads,
        kv_channels=args.head_dim,
        attention_dropout=0.0,
        attention_backend=backend,
    )
    return PackedAttention(config)


def milliseconds(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """The least of `repeats` calls, by the device's clock on CUDA."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            function()
            times.append((time.perf_counter() - started) * 1e3)
    return min(times)


def measure(
    attention: PackedAttention, lengths: Sequence[int], args: argparse.Namespace, device: torch.device, exact: Tensors
) -> dict[str, Any]:
    *leaves, gradient = inputs(sum(lengths), args, device, args.dtype)
    sequences = packed(lengths, args.head_dim, device, args.dtype)

    def forward() -> torch.Tensor:
        return attention(*leaves, None, packed_seq_params=sequences)

    def first() -> Tensors:
        output = forward()
        found = (output.detach(), *torch.autograd.grad(output, leaves, gradient))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found

    started = time.perf_counter()
    found = first()
    first_s = time.perf_counter() - started
    output = forward()
    gradients = partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True)
    backward_ms = milliseconds(gradients, args.repeats, device)
    with torch.no_grad():
        forward_ms = milliseconds(forward, args.repeats, device)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    flops = 4.0 * args.heads * args.head_dim * pairs
    return {
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(backward_ms, 3),
        "forward_tflops": round(flops / forward_ms / 1e9, 1),
        "backward_tflops": round(2.5 * flops / backward_ms / 1e9, 1),
        "first_call_s": round(first_s, 3),
        "relative_error": [round(float((a - b).norm() / b.norm()), 5) for a, b in zip(found, exact, strict=True)],
    }


def run(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    cases = {str(n): [n] * max(1, args.tokens // n) for n in args.lengths}
    for i in range(3):  # of different numbers of tokens and sequences: what is planned for one may not serve the next
        cases[f"mixed {i}"] = sorted(
            generator.integers(args.lengths[0] // 16, args.lengths[0], args.tokens // args.lengths[0] + i).tolist()
        )
    rows = []
    for case, lengths in cases.items():
        exact = exact_values(lengths, args, device)
        for backend in BACKENDS:
            try:
                attention_backend(backend.name, device, args.dtype, args.head_dim)
            except ConfigError as error:
                print(f"{case:>8} {backend.name}: {error}", flush=True)
                continue
            chosen = {"": nullcontext()}
            if backend is AttnBackend.local and device.type == "cuda" and not case.startswith("mixed"):
                chosen[" by cuDNN"] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
            for name, context in chosen.items():
                with context:
                    row = measure(module_of(backend, args), lengths, args, device, exact)
                rows.append(
                    {"case": case, "sequences": len(lengths), "tokens": sum(lengths), "backend": backend.name + name}
                    | row
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def exact_values(lengths: Sequence[int], args: argparse.Namespace, device: torch.device) -> Tensors:
    """Output and gradients in float32, from the same rounded inputs; on CUDA by the memory-saving kernel."""
    *leaves, gradient = (x.detach().float().requires_grad_() for x in inputs(sum(lengths), args, device, args.dtype))
    sequences = packed(lengths, args.head_dim, device, torch.float32)
    output = module_of(AttnBackend.local, args)(*leaves, None, packed_seq_params=sequences)
    return (output.detach(), *torch.autograd.grad(output, leaves, gradient))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], help="of its sequences")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.attention", *sys.argv[1:]]),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "megatron-core"),
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "runs": run(args, device),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"attention-{place(gpu)}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Causal attention over packed sequences by each backend the trainer can take: TFLOP/s forward and backward, and how
long a batch of a new shape takes the first time.

usage: python -m scripts.bench.attention [--tokens 16384] [--lengths 1024 4096 8192] [--repeats 20]
           [--out scripts/bench/results]

Heads are Qwen3-30B-A3B's (without CUDA the tiny model's); `mixed` are random lengths up to the first of `--lengths`.
FLOPs are of the pairs of positions that see each other, 4 for each element of a head in the forward and 10 in the
backward, which computes the scores again. Outputs and gradients are compared with float32 ones of `local`. Writes
attention-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlhpc.backends.megatron.attention import PackedAttention, PackedSequences
from rlhpc.backends.megatron.attention_backend import BACKENDS, Heads, attention_backend
from rlhpc.backends.megatron.model import transformer_config
from rlhpc.data.packing import TokenSequence, pack
from rlhpc.errors import ConfigError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import ModelFacts, family_for
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.sync import QWEN3_30B
from scripts.make_tiny_model import tiny_config

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Setting:
    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype
    repeats: int

    def packed(self, lengths: Sequence[int]) -> PackedSequences:
        sequences = [TokenSequence(i, np.zeros(length, np.int32), 1) for i, length in enumerate(lengths)]
        ((batch,),) = pack(sequences, dp_size=1, max_tokens=sum(lengths))
        batch = replace(batch, **{x: getattr(batch, x).to(self.device) for x in ("input_ids", "position_ids")})
        unused = torch.zeros(self.facts.head_dim // 2, device=self.device)
        return PackedSequences.of(batch, frequencies=unused, dtype=self.dtype)

    def inputs(self, tokens: int) -> Tensors:
        """Query, key, value and the output's gradient: the same ones for every dtype, but for its rounding."""
        generator, facts = torch.Generator().manual_seed(0), self.facts
        heads = (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads, facts.num_heads)
        made = [torch.randn(tokens, n, facts.head_dim, generator=generator).bfloat16() for n in heads]
        query, key, value, gradient = (x.to(self.device, self.dtype) for x in made)
        return (*(x.requires_grad_() for x in (query, key, value)), gradient.flatten(1))

    def attention(self, backend: str) -> PackedAttention:
        heads = Heads.of(self.facts.num_heads, self.facts.num_kv_heads, self.facts.head_dim, tp=1)
        chosen = attention_backend(backend, self.device, self.dtype, heads)
        config = transformer_config(self.facts, ParallelLayout(), self.dtype, attention=chosen, recompute=False)
        return PackedAttention(config)

    def milliseconds(self, function: Callable[[], Any]) -> float:
        """The least of `repeats` calls, by the device's clock on CUDA."""
        times = []
        for _ in range(self.repeats):
            if self.device.type == "cuda":
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


def once(
    attention: PackedAttention, leaves: Sequence[torch.Tensor], gradient: torch.Tensor, packed: PackedSequences
) -> Tensors:
    """The output and the gradients of query, key and value."""
    output = attention.attend(*leaves, packed)
    return (output.detach(), *torch.autograd.grad(output, leaves, gradient))


def exact_values(setting: Setting, lengths: Sequence[int]) -> Tensors:
    """Output and gradients in float32, from the same rounded inputs."""
    wide = replace(setting, dtype=torch.float32)
    *leaves, gradient = wide.inputs(sum(lengths))
    return once(wide.attention("local"), leaves, gradient, wide.packed(lengths))


def measure(setting: Setting, backend: str, lengths: Sequence[int], exact: Tensors) -> dict[str, Any]:
    attention, packed = setting.attention(backend), setting.packed(lengths)
    *leaves, gradient = setting.inputs(sum(lengths))
    started = time.perf_counter()
    found = once(attention, leaves, gradient, packed)
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    output = attention.attend(*leaves, packed)
    backward_ms = setting.milliseconds(partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True))
    with torch.no_grad():
        forward_ms = setting.milliseconds(partial(attention.attend, *leaves, packed))
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    flops = 4.0 * setting.facts.num_heads * setting.facts.head_dim * pairs
    return {
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(backward_ms, 3),
        "forward_tflops": round(flops / forward_ms / 1e9, 1),
        "backward_tflops": round(2.5 * flops / backward_ms / 1e9, 1),
        "first_call_s": round(first_s, 3),
        "relative_error": [round(float((a - b).norm() / b.norm()), 5) for a, b in zip(found, exact, strict=True)],
    }


def run(setting: Setting, args: argparse.Namespace) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    cases = {str(n): [n] * max(1, args.tokens // n) for n in args.lengths}
    for i in range(3):  # other numbers of tokens and sequences: what is planned for one may not serve the next
        longest, num = args.lengths[0], 2 * args.tokens // args.lengths[0] - 3 * i
        cases[f"mixed {i}"] = sorted(generator.integers(longest // 16, longest, num).tolist())
    rows = []
    for case, lengths in cases.items():
        exact = exact_values(setting, lengths)
        chosen: dict[str, AbstractContextManager[Any]] = {backend.name: nullcontext() for backend in BACKENDS}
        if setting.device.type == "cuda" and not case.startswith("mixed"):
            chosen["local by cuDNN"] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        for name, context in chosen.items():
            try:
                with context:
                    row = measure(setting, name.split()[0], lengths, exact)
            except ConfigError as error:
                print(f"{case:>8} {name}: {error}", flush=True)
                continue
            rows.append({"case": case, "sequences": len(lengths), "tokens": sum(lengths), "backend": name} | row)
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], help="of its sequences")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    config = QWEN3_30B if gpu else tiny_config()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    setting = Setting(family_for(config).model_facts(config), device, dtype, args.repeats)
    report = {
        "command": " ".join(["python -m scripts.bench.attention", *sys.argv[1:]]),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "megatron-core", optional=("transformer-engine",)),
        "heads": [setting.facts.num_heads, setting.facts.num_kv_heads, setting.facts.head_dim],
        "runs": run(setting, args),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"attention-{place(gpu)}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

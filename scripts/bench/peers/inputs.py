"""The model and the prompts that rlhpc, verl and TRL all read when they are measured against each other.

usage: python -m scripts.bench.peers.inputs OUT [--shape smollm2|qwen3-slice|tiny] [--tokenizer DIR] [--steps 5]

Writes OUT/model, a Qwen3-MoE in bfloat16 with random weights and the tokenizer of DIR, and OUT/prompts.parquet:
64 prompts for each step, additions in verl's columns, which rlhpc knows; TRL reads `prompt` of them.
The shapes: `smollm2` has SmolLM2-135M's dimensions with 4 experts, 2 of them for a token (373 M parameters);
`qwen3-slice` is 8 layers of Qwen3-30B-A3B (5.6 B); `tiny` is for a CPU, and brings its own tokenizer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from rlhpc.reshard.families import family_for
from scripts.bench.machine import ROOT
from scripts.bench.sync import QWEN3_30B
from scripts.make_tiny_model import tiny_config, write_tokenizer

PROMPTS_PER_STEP = 64
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": QWEN3_30B | {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "moe_intermediate_size": 1536, "num_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3-slice": QWEN3_30B | {"num_hidden_layers": 8},
    "tiny": tiny_config(),
}  # fmt: skip


def write_model(directory: Path, shape: dict[str, Any], tokenizer: Path | None) -> int:
    """An HF directory with random weights, the same for the same shape. Returns the number of its parameters."""
    directory.mkdir(parents=True)
    config = shape | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if tokenizer is None:
        write_tokenizer(directory)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, directory / name)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in family_for(config).canonical_tensors(config).items():
        tensor = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        tensors[name] = tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def write_prompts(file: Path, num_prompts: int) -> None:
    """Sums of 6 to 18 numbers in words: with SmolLM2's tokenizer 85 to 160 tokens, chat template included."""
    rng = random.Random(0)
    rows = []
    for _ in range(num_prompts):
        amounts = [rng.randint(2, 99) for _ in range(rng.randint(6, 18))]
        bought = ", then ".join(f"{amount} apples" for amount in amounts)
        text = f"Ana buys {bought}. How many apples does she have? Think step by step and end with '#### <number>'."
        rows.append(
            {
                "data_source": "apples",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(sum(amounts))},
                "extra_info": {"index": len(rows)},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a directory that must not exist")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument(
        "--tokenizer", type=Path, default=ROOT / "outputs/assets/smollm2/moe", help="SmolLM2's, as README.md makes it"
    )
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    num_parameters = write_model(
        args.out / "model", SHAPES[args.shape], None if args.shape == "tiny" else args.tokenizer
    )
    write_prompts(args.out / "prompts.parquet", PROMPTS_PER_STEP * args.steps)
    print(f"{args.out}: {num_parameters / 1e6:.1f} M parameters, {PROMPTS_PER_STEP * args.steps} prompts")


if __name__ == "__main__":
    main()

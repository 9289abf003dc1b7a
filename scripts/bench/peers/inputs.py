"""The model and the prompts that rlhpc, verl and TRL all read when they are measured against each other.

usage: python -m scripts.bench.peers.inputs OUT [--shape smollm2|qwen3-slice|tiny] [--steps 5]

Writes OUT/model, a Qwen3-MoE in bfloat16 with random weights and a tokenizer of words, and OUT/prompts.jsonl: 64 word
problems for each step, in verl's columns, which rlhpc knows too; TRL takes the messages in `prompt` from them.
The shapes: `smollm2` has SmolLM2-135M's dimensions with 4 experts, 2 of them for a token (373 M parameters);
`qwen3-slice` is 8 layers of Qwen3-30B-A3B (5.6 B); `tiny` is for a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlhpc.reshard.families import family_for
from scripts.bench.prompts import write_problems, write_tokenizer
from scripts.bench.sync import QWEN3_30B
from scripts.make_tiny_model import tiny_config

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


def write_model(directory: Path, shape: dict[str, Any]) -> int:
    """config.json and random weights, the same for the same shape. Returns the number of parameters."""
    directory.mkdir(parents=True)
    config = shape | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in family_for(config).canonical_tensors(config).items():
        tensor = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        tensors[name] = tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def write_prompts(file: Path, num_prompts: int) -> list[str]:
    """Rows of 60 to 150 words in verl's columns. Returns their texts."""
    write_problems(file, num_prompts, shortest=60, longest=150)
    plain = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [
        {
            "data_source": row["data_source"],
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(plain)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["prompt"] for row in plain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a directory that must not exist")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    num_parameters = write_model(args.out / "model", shape)
    texts = write_prompts(args.out / "prompts.jsonl", PROMPTS_PER_STEP * args.steps)
    write_tokenizer(args.out / "model", texts, shape["vocab_size"], ["\n"])  # verl looks for it
    print(f"{args.out}: {num_parameters / 1e6:.1f} M parameters, {len(texts)} prompts")


if __name__ == "__main__":
    main()

"""Makes the tiny Qwen3-MoE, its tokenizer and the arithmetic problems of `experiment=tiny_arithmetic`.

The model is warmed up on flawed demonstrations: 15 % of the additions are right, the others forget every
carry (47+85=22). It learns to compute both sums, of operands it never saw together too, and says the wrong
one six times out of seven: its greedy answer is right only where nothing is carried, about a quarter of the
problems. Which of the two procedures is right is left for reinforcement learning to find.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3MoeForCausalLM

    from rlhpc.data.arithmetic import Addition

VERSION = 1  # of what this script writes: raise it when older outputs should be made anew
ROOT = Path(__file__).resolve().parents[1]
PAD, BOS, EOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID, IM_END_ID = 0, 1, 2, 4
VOCAB_SIZE = 320  # 5 special tokens, 256 bytes and unused ones up to a multiple of 64, so that TP can split it
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level tokenizer without merges: one token per UTF-8 byte, so one per digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = [PAD, BOS, EOS, IM_START, IM_END]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: idx for idx, token in enumerate(tokens + reserved)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special + reserved)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of a Qwen3-MoE of 1.2 million parameters, spelled as published checkpoints are."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.07,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    } | overrides


def build_model(seed: int, config: dict[str, Any]) -> Qwen3MoeForCausalLM:
    """A randomly initialised float32 model of a config.json's content."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(config)).float()


def save_hf(model: Qwen3MoeForCausalLM, config: dict[str, Any], directory: Path) -> None:
    """Writes model.safetensors, config.json, generation_config.json and the tokenizer to `directory`."""
    model.save_pretrained(directory)
    # Transformers 5 renames `num_experts` and `rope_theta` when it saves; published checkpoints don't.
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # An assistant's turn ends with <|im_end|>, a bare completion with <|endoftext|>: both stop generation.
    generation = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory)


@dataclass(frozen=True)
class WarmUp:
    """The supervised warm-up: AdamW, linear warm-up and cosine decay, loss on the answer's tokens."""

    right_share: float = 0.15  # of the demonstrations; the rest drop every carry
    num_val_pairs: int = 200  # unordered pairs of operands held out from the warm-up and from RL
    steps: int = 550
    batch_size: int = 256
    lr: float = 3e-3
    lr_warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_grad: float = 1.0


def encode(problems: Sequence[Addition], answers: Sequence[str]) -> torch.Tensor:
    """Token ids int64 [N, 10]: "47+85=" (6 tokens), the answer (1 to 3 digits), end of text, padding."""
    import torch
    from tokenizers import pre_tokenizers

    ids = {token: idx + 5 for idx, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rows = [[ids[c] for c in p.prompt + answer] + [EOS_ID] for p, answer in zip(problems, answers, strict=True)]
    return torch.tensor([row + [PAD_ID] * (10 - len(row)) for row in rows])


def answer_logprobs(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N, 4] of the answers' tokens given all before, and the mask [N, 4] of real ones."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=4).logits
    targets = tokens[:, 6:]
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0], targets != PAD_ID


def warm_up(model: Qwen3MoeForCausalLM, problems: Sequence[Addition], recipe: WarmUp, seed: int) -> None:
    """Trains `model` in place on demonstrations of which `recipe.right_share` are right."""
    import torch
    from tqdm import tqdm

    right = encode(problems, [p.answer for p in problems])
    wrong = encode(problems, [p.carryless_answer for p in problems])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    bar = tqdm(range(recipe.steps), desc="warm-up", unit="step")
    for step in bar:
        rise, decay = (step + 1) / recipe.lr_warmup_steps, 0.5 + 0.5 * math.cos(math.pi * step / recipe.steps)
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, rise) * decay
        rows = torch.randint(len(problems), (recipe.batch_size,), generator=generator)
        is_right = torch.rand(recipe.batch_size, 1, generator=generator) < recipe.right_share
        logprobs, mask = answer_logprobs(model, torch.where(is_right, right[rows], wrong[rows]))
        loss = -(logprobs * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def accuracy(model: Qwen3MoeForCausalLM, problems: Sequence[Addition]) -> tuple[float, float]:
    """Greedy accuracy, and the mean probability of the right answer (accuracy at temperature 1)."""
    import torch

    truth = encode(problems, [p.answer for p in problems])
    with torch.no_grad():
        logprobs, mask = answer_logprobs(model, truth)
        sampled = (logprobs * mask).sum(1).exp().mean().item()
        tokens = truth[:, :6]
        for _ in range(4):
            next_ids = model(tokens, use_cache=False, logits_to_keep=1).logits[:, 0].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, next_ids], 1)
        greedy = ((tokens == truth) | (truth == PAD_ID)).all(1).float().mean().item()
    return greedy, sampled


def make(out: Path, seed: int, recipe: WarmUp) -> None:
    """Writes `out`/{model/, train.jsonl, val.jsonl, made_by.json} in one rename, unless they are there."""
    from rlhpc.data.arithmetic import split, write_jsonl
    from rlhpc.errors import DataError

    made_by = {"version": VERSION, "seed": seed, "warm_up": asdict(recipe), "config": tiny_config()}
    stamp = json.dumps(made_by, indent=2) + "\n"
    stamp_file = out / "made_by.json"
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        print(f"{out} is up to date")
        return
    if out.is_dir() and not stamp_file.is_file() and any(out.iterdir()):
        raise DataError(f"--out={out} has other files in it; choose a new or empty directory")

    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    start_s = time.perf_counter()
    train, val = split(recipe.num_val_pairs, seed)
    model = build_model(seed, tiny_config())
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"warming up a {num_parameters / 1e6:.2f} M parameter Qwen3-MoE on {len(train)} additions, of which "
        f"{recipe.right_share:.0%} of the demonstrations are right and the rest forget to carry"
    )
    warm_up(model, train, recipe, seed)
    greedy, sampled = accuracy(model, val)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = Path(scratch) / out.name
        (made / "model").mkdir(parents=True)
        save_hf(model, tiny_config(), made / "model")
        write_jsonl(made / "train.jsonl", train)
        write_jsonl(made / "val.jsonl", val)
        (made / stamp_file.name).write_text(stamp)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    print(
        f"made {out} in {time.perf_counter() - start_s:.0f} s: {len(train)} training, {len(val)} validation "
        f"problems; validation accuracy {greedy:.3f} greedy, {sampled:.3f} sampled"
    )


def main() -> int:
    sys.path.insert(0, str(ROOT))  # runs from a checkout that isn't installed, too
    from rlhpc.errors import RlhpcError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/assets/tiny_arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        make(args.out.resolve(), args.seed, WarmUp())
    except RlhpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

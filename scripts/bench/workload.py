"""A GRPO run as several benches start it: on a slice of Qwen3-30B-A3B's shape with random weights (without CUDA on a
shape of a million), with prompts of known lengths and answers that never end early."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhpc.metrics.jsonl import MetricsFile
from scripts.bench.machine import ROOT
from scripts.bench.processes import in_a_process_of_its_own
from scripts.bench.prompts import CHAT_TOKENS, write_problems, write_tokenizer
from scripts.bench.train import write_model

FOLDER = ROOT / "outputs/bench/workload"


@dataclass(frozen=True)
class Workload:
    """What a bench's command line says of it, under the same names."""

    ranks: int  # a GPU each
    layers: int  # of the slice
    model: Path | None  # an HF directory; the slice is written there where nothing is
    train_files: list[str]  # in place of problems of `prompt_tokens`
    prompt_tokens: tuple[int, int]  # shortest, longest
    prompts: int  # a step
    n: int  # answers to each
    response: int  # tokens of an answer

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
        """The options; `defaults` for ranks, layers, prompts, n and response."""
        parser.add_argument("--ranks", type=int, help="a GPU each")
        parser.add_argument("--layers", type=int, help="of the slice")
        parser.add_argument("--model", type=Path, help="an HF directory; the slice is written there where nothing is")
        parser.add_argument("--train-files", nargs="*", default=[], help="problems such as GSM8K's train.jsonl")
        parser.add_argument(
            "--prompt-tokens", type=int, nargs=2, default=(100, 200), metavar=("SHORTEST", "LONGEST"),
            help="of problems made here, without --train-files",
        )  # fmt: skip
        parser.add_argument("--prompts", type=int, help="a step")
        parser.add_argument("--n", type=int, help="answers to each")
        parser.add_argument("--response", type=int, help="tokens of an answer")
        parser.set_defaults(**defaults)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Workload:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def prepare(self, device: str, num_steps: int) -> tuple[Path, list[str]]:
        """The model's directory and the data files; what is missing of them is written."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        model = self.model or FOLDER / (f"{self.layers}-layers" if device == "cuda" else "tiny")
        files = [str(Path(file).resolve()) for file in self.train_files]
        if not files:
            files = [str(FOLDER / "problems.jsonl")]
            write_problems(Path(files[0]), self.prompts * num_steps, *self.prompt_tokens)
        config = in_a_process_of_its_own(write_model, model, self.layers, device)
        if self.model is None or not [*model.glob("tokenizer*"), *model.glob("vocab*")]:
            rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
            write_tokenizer(model, [row.get("prompt") or row["question"] for row in rows], config["vocab_size"])
        return model, files

    def run(
        self, model: Path, files: Sequence[str], run_dir: Path, device: str, num_steps: int, overrides: Sequence[str]
    ) -> list[dict[str, Any]]:
        """The metrics of each step of a new run, step 0 included. Raises SystemExit where it fails."""
        longest = 512 if self.train_files else self.prompt_tokens[1] + CHAT_TOKENS
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [
            sys.executable, "launch/run.py", f"run_dir={run_dir}", f"trainer.device={device}",
            f"trainer.n_gpus_per_node={self.ranks}", f"trainer.total_training_steps={num_steps}",
            "trainer.total_epochs=1000", "trainer.val_before_train=false", "checkpoint.save_final=false",
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            f"actor_rollout_ref.rollout.n={self.n}", "actor_rollout_ref.rollout.ignore_eos=true",
            f"actor_rollout_ref.rollout.max_num_seqs={self.prompts * self.n}",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
            f"data.train_files=[{','.join(files)}]", f"data.train_batch_size={self.prompts}",
            f"data.max_prompt_length={longest}", f"data.max_response_length={self.response}",
            "reward.name=format", "+reward.kwargs.pattern='.*[0-4]'", *overrides,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"the run ended with {done.returncode}; its logs are in {run_dir / 'logs'}")
        return MetricsFile(run_dir / "metrics.jsonl").read()

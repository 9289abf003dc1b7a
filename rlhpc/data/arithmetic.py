"""Two-digit additions: small enough for a million parameters to learn by GRPO in minutes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhpc.data.operands import split_by_pair

OPERANDS = range(10, 100)  # 8,100 problems, all of one prompt length


@dataclass(frozen=True)
class Addition:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def carryless_answer(self) -> str:
        """The sum of each column modulo ten, as by a pupil who forgets to carry: "47+85=" -> "22"."""
        tens = (self.left // 10 + self.right // 10) % 10
        return str(10 * tens + (self.left + self.right) % 10)

    def row(self) -> dict[str, str]:
        return {"prompt": self.prompt, "ground_truth": self.answer, "data_source": "arithmetic"}


def split(num_val_pairs: int, seed: int) -> tuple[list[Addition], list[Addition]]:
    """All additions as (train, validation), each in an order drawn from `seed`.

    Validation holds `num_val_pairs` random unordered pairs of operands, each as a+b and as b+a, so that no
    validation problem occurs in training with its operands swapped. Raises DataError for a number that leaves either
    side empty.
    """
    return split_by_pair(
        OPERANDS, num_val_pairs, seed, lambda pair, _: (Addition(*operands) for operands in {pair, pair[::-1]})
    )


def write_jsonl(path: Path, problems: Iterable[Addition]) -> None:
    """Writes one row a problem: prompt, ground_truth and data_source, the name of the reward."""
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems))

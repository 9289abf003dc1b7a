"""Two-digit additions: small enough for a million parameters to learn by GRPO in minutes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhpc.errors import DataError

LOW, HIGH = 10, 99  # operands, both inclusive: 8,100 problems, all of one prompt length


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
    validation problem occurs in training with its operands swapped.
    """
    pairs = [(low, high) for low in range(LOW, HIGH + 1) for high in range(low, HIGH + 1)]
    if not 0 < num_val_pairs < len(pairs):
        raise DataError(f"num_val_pairs={num_val_pairs} must be between 1 and {len(pairs) - 1}")
    rng = np.random.Generator(np.random.Philox(seed))
    order = rng.permutation(len(pairs))

    def problems(indices: np.ndarray) -> list[Addition]:
        chosen = [Addition(*operands) for i in indices for operands in {pairs[i], pairs[i][::-1]}]
        return [chosen[i] for i in rng.permutation(len(chosen))]

    return problems(order[num_val_pairs:]), problems(order[:num_val_pairs])


def write_jsonl(path: Path, problems: Iterable[Addition]) -> None:
    """Writes one row a problem: prompt, ground_truth and data_source, the name of the reward."""
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems))

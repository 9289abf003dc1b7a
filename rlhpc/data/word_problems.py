"""Arithmetic word problems of one step, made from templates: what a small instruct model answers now and then, and so
can learn by being told which answers were right."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rlhpc.data.operands import Pair, split_by_pair

INSTRUCTION = "Answer with the number alone."
OPERANDS = range(2, 21)
NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps", "stickers")

# The text of a problem and its operation; in a subtraction the first number is the larger one.
TEMPLATES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", "+"),
    ("There are {a} {things} in one box and {b} {things} in another. How many {things} are there in all?", "+"),
    ("{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find?", "+"),
    ("{name} has {a} {things} and gives {b} of them away. How many {things} are left?", "-"),
    ("A shop had {a} {things} and sold {b}. How many {things} does it still have?", "-"),
    ("{name} needs {a} {things} and has {b}. How many {things} are missing?", "-"),
    ("{name} buys {a} bags with {b} {things} each. How many {things} is that?", "*"),
    ("{a} children bring {b} {things} each. How many {things} do they bring together?", "*"),
)
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class WordProblem:
    template: int  # of TEMPLATES
    a: int
    b: int
    name: str
    things: str

    @property
    def text(self) -> str:
        return TEMPLATES[self.template][0].format(a=self.a, b=self.b, name=self.name, things=self.things)

    @property
    def answer(self) -> int:
        return _OPERATIONS[TEMPLATES[self.template][1]](self.a, self.b)

    def row(self) -> dict[str, str]:
        return {
            "prompt": f"{self.text} {INSTRUCTION}",
            "ground_truth": str(self.answer),
            "data_source": "word_problems",
        }


def split(num_val_pairs: int, seed: int) -> tuple[list[WordProblem], list[WordProblem]]:
    """Every template with every pair of operands once, names and things drawn from `seed`, as (train, validation).

    Validation holds `num_val_pairs` random unordered pairs of operands, under every template: no sum, difference or
    product in it occurs in training, so it can't have been learnt by heart. Raises DataError for a number that leaves
    either side empty.
    """
    return split_by_pair(OPERANDS, num_val_pairs, seed, _on)


def _on(pair: Pair, rng: np.random.Generator) -> Iterator[WordProblem]:
    low, high = pair
    for template, (_, operation) in enumerate(TEMPLATES):
        for a, b in [(high, low)] if operation == "-" else sorted({(low, high), (high, low)}):
            name, things = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
            yield WordProblem(template, a, b, name, things)

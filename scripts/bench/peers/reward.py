"""One reward in the three forms in which rlhpc, verl and TRL call it: the share of digits in an answer.

Random weights answer no problem, so a reward of right answers would be 0 throughout and every advantage with it; this
one differs between the answers to a prompt. It costs microseconds and needs nothing but the standard library.
"""

from __future__ import annotations

from typing import Any


def share_of_digits(completion: str, ground_truth: str = "", **_: Any) -> float:
    """As rlhpc calls it, once per answer: reward.name=FILE:share_of_digits."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def verl_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """As verl calls it, once per answer: reward.custom_reward_function.name=verl_score."""
    return share_of_digits(solution_str)


def trl_scores(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """As TRL calls it, with all answers at once, each a list of one message."""
    return [share_of_digits(answer[0]["content"]) for answer in completions]

"""Rule rewards: pure functions of the completion's text and the ground truth."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rlhpc.errors import ConfigError

_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_GSM8K_TAIL_CHARS = 300
_THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


# (completion, ground_truth, **kwargs) -> score. The completion is the decoded response without the prompt.
Reward = Callable[..., float]


class _Registry(dict[str, Reward]):
    def __missing__(self, name: str) -> Reward:
        raise ConfigError(f"unknown reward {name!r}; choose {', '.join(sorted(self))}, or path/to/file.py:function")


REWARDS: dict[str, Reward] = _Registry()

# The reward of a data source that isn't itself a reward's name: the names that verl's preprocessing writes.
REWARD_OF_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}


def register(name: str) -> Callable[[Reward], Reward]:
    """Enters a reward into REWARDS."""

    def enter(reward: Reward) -> Reward:
        assert name not in REWARDS, f"reward {name} is registered twice"
        REWARDS[name] = reward
        return reward

    return enter


def reward_of_source(data_source: str) -> str:
    """The name of the reward for a data source. Raises ConfigError listing the known ones."""
    name = REWARD_OF_SOURCE.get(data_source, data_source)
    if name not in REWARDS:
        known = ", ".join(sorted({*REWARD_OF_SOURCE, *REWARDS}))
        raise ConfigError(
            f"no reward for data_source={data_source!r}; known: {known}. Set reward.name to one of "
            f"{', '.join(sorted(REWARDS))} or to path/to/file.py:function"
        )
    return name


@register("gsm8k")
def gsm8k(completion: str, ground_truth: str, *, method: str = "strict", format_score: float = 0.0) -> float:
    """1.0 when the answer equals the ground truth, which is a number without thousands separators.

    Looks at the last 300 characters. "strict": the last "#### <number>", compared as text without commas
    (verl 0.9, utils/reward_score/gsm8k.py). "flexible": the last number wherever it stands; unlike verl's,
    punctuation at its end and commas in it don't count. A wrong answer scores `format_score`, none at all 0.0.
    """
    tail = completion[-_GSM8K_TAIL_CHARS:]
    if method == "strict":
        answers = [number.replace(",", "") for number in re.findall(r"#### (-?[0-9.,]+)", tail)]
    elif method == "flexible":
        numbers = re.findall(r"-?[0-9][0-9.,]*|-?\.[0-9]+", tail)
        answers = [number.rstrip(".,").replace(",", "") for number in numbers]
    else:
        raise ConfigError(f"reward.kwargs.method={method!r} of gsm8k must be strict or flexible")
    if not answers:
        return 0.0
    return 1.0 if answers[-1] == ground_truth else format_score


@register("arithmetic")
def arithmetic(completion: str, ground_truth: str) -> float:
    """1.0 when the whole completion, white space around it aside, is the integer of the ground truth.

    A right number followed by anything else scores 0, so the model must also learn to stop.
    """
    answer, truth = completion.strip(), ground_truth.strip()
    return float(_INTEGER.fullmatch(answer) is not None and int(answer) == int(truth))


@register("format")
def follows_format(completion: str, ground_truth: str, *, pattern: str = _THINK_THEN_ANSWER) -> float:
    """1.0 when the whole completion matches `pattern` (a regular expression in which '.' matches newlines).

    The default asks for one <think> block and then one <answer> block. The ground truth plays no part.
    """
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


@register("math")
def math_answer(completion: str, ground_truth: str) -> float:
    """1.0 when math-verify finds the final expression, LaTeX or plain, equal to the ground truth.

    Settings as verl 0.9, utils/reward_score/math_verify.py. math-verify's own time limit is off, as it uses
    signal.alarm, which works in a main thread only; RewardPool bounds the time from outside.
    """
    parser, grader = _math_verify()
    latex, expression = parser.LatexExtractionConfig(), parser.ExprExtractionConfig()
    gold = parser.parse(rf"\boxed{{{ground_truth}}}", (latex,), parsing_timeout=None)
    answer = parser.parse(completion, (expression, latex), parsing_timeout=None)
    return float(grader.verify(gold, answer, timeout_seconds=None))


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import grader, parser
    except ModuleNotFoundError as error:
        message = "the math reward needs math-verify; run: pip install 'math-verify[antlr4_13_2]'"
        raise ConfigError(message) from error
    return parser, grader

import pytest

from rlhpc.errors import ConfigError
from rlhpc.rewards import REWARDS, reward_of_source


@pytest.mark.parametrize(
    ("completion", "truth", "strict", "flexible"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### 8\nno:\n#### 7", "7", 1, 1),  # the last one counts
        ("#### 7\nno:\n#### 8", "7", 0, 0),
        ("The answer is 7", "7", 0, 1),  # no marker
        ("The answer is $1,234.", "1234", 0, 1),
        ("####7", "7", 0, 1),  # strict wants the space
        ("#### $7", "7", 0, 1),
        ("#### 7.0", "7", 0, 0),  # compared as text
        ("#### 70", "7", 0, 0),
        ("#### 17", "7", 0, 0),
        ("", "7", 0, 0),
        ("####", "7", 0, 0),
        ("...", "7", 0, 0),
        ("#### 7" + "x" * 294, "7", 1, 1),  # 300 characters from the end: just inside
        ("#### 7" + "x" * 295, "7", 0, 1),  # the marker is cut in half, the number isn't
        ("#### 7" + "x" * 300, "7", 0, 0),
        ("#### 0.5", "0.5", 1, 1),
        (".5", ".5", 0, 1),
    ],
)
def test_gsm8k(completion, truth, strict, flexible):
    assert REWARDS["gsm8k"](completion, truth) == strict
    assert REWARDS["gsm8k"](completion, truth, method="strict") == strict
    assert REWARDS["gsm8k"](completion, truth, method="flexible") == flexible


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [("so #### 7", 1.0, 1.0), ("so #### 8", 0.1, 0.1), ("so 8", 0.0, 0.1), ("so 7", 0.0, 1.0), ("no idea", 0.0, 0.0)],
)
def test_gsm8k_credits_the_form_of_a_wrong_answer(completion, strict, flexible):
    assert REWARDS["gsm8k"](completion, "7", format_score=0.1) == strict
    assert REWARDS["gsm8k"](completion, "7", method="flexible", format_score=0.1) == flexible


def test_gsm8k_refuses_an_unknown_method():
    with pytest.raises(ConfigError, match="method='loose'.*strict or flexible"):
        REWARDS["gsm8k"]("#### 7", "7", method="loose")


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ("132", "132", 1),
        (" 132\n", "132", 1),
        ("+132", "132", 1),
        ("-4", "-4", 1),
        ("0132", "132", 1),
        ("132.", "132", 0),
        ("132 ", " 132", 1),
        ("132 133", "132", 0),  # the right number, but it didn't stop
        ("=132", "132", 0),
        ("1 32", "132", 0),
        ("١٣٢", "132", 0),  # other digits than 0-9
        ("", "132", 0),
        ("-", "132", 0),
        ("9" * 5000, "132", 0),  # beyond what Python converts
    ],
)
def test_arithmetic(completion, truth, score):
    assert REWARDS["arithmetic"](completion, truth) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>2+2\nis 4</think>\n<answer>4</answer>", 1),
        ("  <think></think><answer></answer>\n", 1),
        ("<think>a</think>", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a</think>then<answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer> and more", 0),
        ("<think>a<think>b</think><answer>4</answer>", 0),
        ("<think>a</think>b</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
    ],
)
def test_format(completion, score):
    assert REWARDS["format"](completion, "") == score


def test_format_with_a_pattern_of_ones_own():
    assert REWARDS["format"]("Answer: 4\n", "", pattern=r"Answer: \d") == 1
    assert REWARDS["format"]("Answer: four", "", pattern=r"Answer: \d") == 0


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        (r"Thus the result is $\boxed{\frac{1}{2}}$.", "0.5", 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        ("The answer is 42", "42", 1),
        (r"\boxed{\frac{1}{3}}", "0.5", 0),
        ("no idea", "42", 0),
    ],
)
def test_math(completion, truth, score):
    pytest.importorskip("math_verify", reason="an optional extra")
    assert REWARDS["math"](completion, truth) == score


def test_data_sources_lead_to_their_rewards():
    assert reward_of_source("openai/gsm8k") == reward_of_source("gsm8k") == "gsm8k"
    assert reward_of_source("arithmetic") == "arithmetic"
    with pytest.raises(ConfigError, match=r"data_source='poems'; known: .*arithmetic.*openai/gsm8k.*reward.name"):
        reward_of_source("poems")
    with pytest.raises(ConfigError, match="unknown reward 'poem'; choose arithmetic, format, gsm8k, math"):
        REWARDS["poem"]

"""A reward's file, judged by its text alone."""

import pytest

from rlhpc.rewards.source import problem

TEXT = """
import nowhere_to_be_found
from elsewhere import compute_score as imported
try:
    from fast import quick
except ImportError:
    def quick(completion, ground_truth): return 0.0
alias = lambda completion, ground_truth: 1.0
def plain(completion, ground_truth): return 1.0
"""


@pytest.mark.parametrize("name", ["imported", "quick", "alias", "plain"])
def test_every_way_to_have_a_function(tmp_path, name):
    (tmp_path / "mine.py").write_text(TEXT)
    assert problem(tmp_path / "mine.py", name) is None


def test_what_is_wrong(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    assert problem(file, "plan") == "has no function 'plan'; choose plain"
    file.write_text("from elsewhere import *\n")
    assert problem(file, "anything") is None
    file.write_text("def broken(:\n")
    assert "is no Python: invalid syntax (mine.py, line 1)" in str(problem(file, "broken")).replace(f"{tmp_path}/", "")

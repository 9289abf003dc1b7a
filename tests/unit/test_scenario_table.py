"""docs/slurm-scenarios.md names every scenario once, and only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs/slurm-scenarios.md").read_text()


def test_every_scenario_has_a_row() -> None:
    assert sorted(int(number) for number in re.findall(r"^\| (\d+) \|", TABLE, re.MULTILINE)) == list(range(1, 37))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`((?:slurm|unit|e2e|distributed)/[\w/]+)(?:::(\w+))?`", TABLE)
    assert len(named) > 36
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^def test_{test or '.*'}\(", (ROOT / "tests" / _file_name(file)).read_text(), re.MULTILINE)
    ]
    assert missing == []


def _file_name(file: str) -> str:
    folder, _, name = file.rpartition("/")
    return f"{folder}/test_{name}.py"

"""`rlhpc doctor`: what would keep a run from working here, as a table or as JSON. Standard library only: it has to tell
when other packages are missing."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rlhpc.cli.output import reader_may_leave
from rlhpc.config.schema import RunConfig
from rlhpc.doctor.examine import Part, examine

EXIT_OK, EXIT_FAILED = 0, 1
COLOURS = {"ok": "32", "warning": "33", "failed": "31"}
MIN_WIDTH = 60


def doctor(cfg: RunConfig | None, *, slurm: bool, gpu: bool, as_json: bool) -> int:
    """Prints every finding; the exit code, 1 where something failed."""
    parts = examine(cfg, slurm=slurm, gpus=gpu)
    if as_json:
        text = json.dumps([{"part": part.name, **asdict(one)} for part in parts for one in part.findings], indent=1)
    else:
        width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
        text = "\n".join(_lines(parts, max(MIN_WIDTH, width), coloured=sys.stdout.isatty()))
    with reader_may_leave():
        print(text)
    failed = any(one.level == "failed" for part in parts for one in part.findings)
    return EXIT_FAILED if failed else EXIT_OK


def _lines(parts: Sequence[Part], width: int, *, coloured: bool) -> Iterator[str]:
    column = max(len(one.check) for part in parts for one in part.findings) + 2
    indent = " " * (11 + column)
    for part in parts:
        yield part.name
        for one in part.findings:
            level = f"\033[{COLOURS[one.level]}m{one.level:<9}\033[0m" if coloured else f"{one.level:<9}"
            first, *more = textwrap.wrap(one.found, width - len(indent), break_on_hyphens=False) or [""]
            yield f"  {level}{one.check:<{column}}{first}"
            yield from (f"{indent}{line}" for line in more)
            if one.fix:
                yield from textwrap.wrap(
                    f"fix: {one.fix}", width, initial_indent=indent, subsequent_indent=f"{indent}     ",
                    break_on_hyphens=False, break_long_words=False,
                )  # fmt: skip
    levels = Counter(one.level for part in parts for one in part.findings)
    yield ", ".join(f"{levels[level]} {level}" for level in ("failed", "warning", "ok") if levels[level])

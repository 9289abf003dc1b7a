"""Entry of `rlhpc resume RUN [KEY=VALUE ...]`: the run's own configuration and the overrides -> compared -> started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # launch.run does the rest

from launch.run import CONFIGS, ExitCodes  # noqa: E402  # isort: skip  # first: it says what an environment lacks

from launch.composition import composed_from  # noqa: E402
from launch.overrides import checked  # noqa: E402
from rlhpc.cli import resume  # noqa: E402
from rlhpc.cluster import submission  # noqa: E402
from rlhpc.config.schema import RunConfig  # noqa: E402
from rlhpc.config.tree import shown  # noqa: E402
from rlhpc.errors import ConfigError  # noqa: E402


def main(directory: Path, arguments: Sequence[str]) -> int:
    """The exit code of what was started: 0 for a job that was submitted."""
    from launch.modes import MODES

    old = resume.settings_of(directory)
    new = composed(old, arguments)
    changes = resume.changes(directory, old, new)
    submission.refuse_held(str(directory))
    if resume.finished(new):
        print(f"{directory} has finished; train it for longer with trainer.total_training_steps=N")
        return 0
    print(f"resuming {directory}" + (", changed:" if changes else " as it was"))
    for line in shown(changes):
        print(f"  {line}")
    if new.launch.mode == "allocation" and "SLURM_JOB_ID" not in os.environ:
        made = submission.Submission.read(directory)
        raise ConfigError(
            f"{directory} ran in an allocation{f' ({made.command})' if made else ''}, and this is none; submit it: "
            f"rlhpc resume {directory} launch.mode=slurm, or with sbatch as before"
        )
    sys.stdout.flush()
    return MODES[new.launch.mode](new)


def composed(old: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """The configuration with overrides on top: keys, or options of groups (cluster=h200). Raises ConfigError."""
    flags = [argument for argument in arguments if argument.startswith("-") or "=" not in argument]
    if flags:
        raise ConfigError(f"{flags[0]!r} is no override; give KEY=VALUE, such as trainer.total_training_steps=200")
    overrides = [
        f"+{argument}" if (CONFIGS / argument.partition("=")[0]).is_dir() else argument
        for argument in checked(arguments, CONFIGS)
    ]
    return composed_from("resumed", "resumed", old.tree(), overrides, CONFIGS)


if __name__ == "__main__":
    with ExitCodes():
        raise SystemExit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))

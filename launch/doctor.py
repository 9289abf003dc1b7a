"""Entry of `rlhpc doctor KEY=VALUE ...`: a run's configuration -> what it needs, compared with this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # launch.run does the rest

from launch.run import CONFIGS, ExitCodes  # noqa: E402  # isort: skip  # first: it says what an environment lacks

from launch.composition import composed_from  # noqa: E402
from launch.overrides import checked  # noqa: E402
from rlhpc.cli.doctor import doctor  # noqa: E402
from rlhpc.cli.parser import build  # noqa: E402
from rlhpc.config.load import defaults  # noqa: E402
from rlhpc.config.schema import RunConfig  # noqa: E402


def composed(overrides: Sequence[str]) -> RunConfig:
    """What launch/run.py would make of them. Raises ConfigError."""
    return composed_from("config", "schema", defaults(), checked(overrides, CONFIGS), CONFIGS)


def main(arguments: Sequence[str]) -> int:
    args = build().parse_args(["doctor", *arguments])
    return doctor(composed(args.overrides), slurm=args.slurm, gpu=args.gpu, as_json=args.json)


if __name__ == "__main__":
    with ExitCodes():
        raise SystemExit(main(sys.argv[1:]))

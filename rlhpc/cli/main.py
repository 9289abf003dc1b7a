"""The `rlhpc` command. Each subcommand imports what it needs, so that `rlhpc --help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rlhpc.errors import ConfigError, RlhpcError

USER_ERROR = 2
LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "run.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code (2: something that the user can mend)."""
    args, rest = _parser().parse_known_args(argv)
    if rest and args.command not in ("train", "plan"):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.command == "train":
            _launch(rest)
        if args.command == "plan":
            _launch([*rest, "launch.dry_run=true"])
        if args.command == "report":
            from rlhpc.cli.report import report

            print(report(Path(args.run_dir), Path(args.plot) if args.plot else None), flush=True)
        if args.command == "upcycle":
            from rlhpc.cli.upcycle import Upcycling, upcycle

            names = (field.name for field in fields(Upcycling))
            print(upcycle(args.source, args.target, Upcycling(**{name: getattr(args, name) for name in names})))
    except RlhpcError as error:
        for line in filter(None, str(error).splitlines()):
            print(f"error: {line}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader had enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the last flush, at exit, fail
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rlhpc", description="reinforcement learning for MoE language models")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("train", "train here, or go on with an interrupted run"),
        ("plan", "print the layout and the memory plan, start nothing"),
    ):
        commands.add_parser(
            name,
            help=what,
            description=f"{what}; takes what launch/run.py takes: experiment=tiny_arithmetic KEY=VALUE ...",
            add_help=False,
        )
    report = commands.add_parser("report", help="summarise a run and plot it")
    report.add_argument("run_dir", metavar="RUN_DIR", help="the directory with metrics.jsonl")
    report.add_argument("--plot", metavar="PNG", help="where the plot goes (default: RUN_DIR/report.png)")
    _add_upcycle(commands.add_parser("upcycle", help="make a dense Llama a mixture of experts (Mixtral's shape)"))
    return parser


def _add_upcycle(parser: argparse.ArgumentParser) -> None:
    parser.description = "sparse upcycling: every expert begins as a copy of the dense MLP, the routers at random"
    parser.add_argument("source", metavar="SRC", type=Path, help="HF directory of a dense Llama")
    parser.add_argument("target", metavar="DST", type=Path, help="directory to make")
    parser.add_argument("--num-experts", type=int, required=True, metavar="E", help="experts of each layer")
    parser.add_argument(
        "--experts-per-token", type=int, required=True, metavar="K", help="of them, how many a token uses (at least 2)"
    )
    parser.add_argument("--router-std", type=float, default=0.02, help="of the routers' random weights (%(default)s)")
    noise = "of noise on the experts' weights, relative to theirs (%(default)s: outputs equal the dense model's)"
    parser.add_argument("--expert-noise", type=float, default=0.0, help=noise)
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (%(default)s)")


def _launch(arguments: Sequence[str]) -> None:
    """Becomes launch/run.py, the one entry that composes configurations."""
    if not LAUNCHER.is_file():
        raise ConfigError(f"{LAUNCHER} is missing; install rlhpc from its repository with: pip install -e .")
    os.execv(sys.executable, [sys.executable, str(LAUNCHER), *arguments])


if __name__ == "__main__":
    sys.exit(main())

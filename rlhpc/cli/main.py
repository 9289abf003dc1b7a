"""The `rlhpc` command. Each subcommand imports what it needs, so that `rlhpc --help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rlhpc.cli import parser
from rlhpc.cli.output import reader_may_leave
from rlhpc.errors import ConfigError, RlhpcError, print_error

USER_ERROR, INTERRUPTED = 2, 130
LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code (2: something that the user can mend)."""
    known = parser.build()
    args, rest = known.parse_known_args(argv)
    if rest and args.command not in ("train", "plan"):
        known.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.command in ("train", "plan"):
            _become("run.py", [*rest, *(["launch.dry_run=true"] if args.command == "plan" else [])])
        code = 0
        with reader_may_leave():
            code = _carry_out(args)
        return code
    except RlhpcError as error:
        print_error(error)
        return error.exit_code
    except PermissionError as error:  # somebody else's run, or process
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; is it somebody else's?", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _carry_out(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from rlhpc.cli.doctor import doctor

        flags = [f"--{name}" for name in ("slurm", "gpu", "json") if getattr(args, name)]
        if args.overrides:
            _become("doctor.py", [*flags, *args.overrides])
        return doctor(None, slurm=args.slurm, gpu=args.gpu, as_json=args.json)
    if args.command == "status":
        from rlhpc.cli.status import status

        status(args.run, as_json=args.json)
    if args.command == "logs":
        from rlhpc.cli.logs import Selection, logs
        from rlhpc.cli.status import one_run

        logs(one_run(args.run).directory, Selection(args.rank, args.node, args.ray, args.lines), follow=args.follow)
    if args.command == "cancel":
        from rlhpc.cli.cancel import cancel

        cancel(args.run, now=args.now)
    if args.command == "resume":
        from rlhpc.cli.status import one_run

        _become("resume.py", [str(one_run(args.run).directory), *args.overrides])
    if args.command == "export":
        from rlhpc.cli.export import export

        print(export(args.checkpoint, args.target, step=args.step, model_dir=args.model, dtype=args.dtype,
                     file_bytes=args.shard_size))  # fmt: skip
    if args.command == "verify":
        from rlhpc.cli.verify import verify

        verify(args.checkpoint, args.step)
    if args.command == "inspect":
        from rlhpc.cli.inspect import inspect

        inspect(args.checkpoint, args.step, pattern=args.tensors, as_json=args.json)
    if args.command == "report":
        from rlhpc.cli.report import report

        print(report(Path(args.run_dir), Path(args.plot) if args.plot else None))
    if args.command == "upcycle":
        from rlhpc.cli.upcycle import Upcycling, upcycle

        names = (field.name for field in fields(Upcycling))
        print(upcycle(args.source, args.target, Upcycling(**{name: getattr(args, name) for name in names})))
    return 0


def _become(script: str, arguments: Sequence[str]) -> None:
    """Becomes a script of launch/, which alone composes configurations."""
    if not (path := LAUNCH / script).is_file():
        raise ConfigError(f"{path} is missing; install rlhpc from its repository with: pip install -e .")
    os.execv(sys.executable, [sys.executable, str(path), *arguments])


if __name__ == "__main__":
    sys.exit(main())

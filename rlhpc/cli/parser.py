"""What `rlhpc` takes, with the help texts. Standard library only, so that `rlhpc --help` is instant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RUN = "a run directory, a directory of several, or a job's id (an array's for all its tasks)"
CHECKPOINT = "a run directory, a job's id, or a checkpoint: .../checkpoints/step-000040"
UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
EXAMPLES = """\
examples:
  rlhpc doctor                                            would a run work here?
  rlhpc train experiment=tiny_arithmetic                  what launch/run.py does
  rlhpc status                                            every run under outputs/ and in the queue
  rlhpc logs -f outputs/rlhpc/default                     follow a run until it has ended
  rlhpc resume outputs/rlhpc/default launch.time_min=600  go on, with something changed
  rlhpc export outputs/rlhpc/default models/mine          the newest checkpoint as a Hugging Face directory
`rlhpc COMMAND --help` tells more."""


def build() -> argparse.ArgumentParser:
    """The parser; `train`, `plan` and `resume` leave overrides over."""
    parser = argparse.ArgumentParser(
        "rlhpc",
        description="reinforcement learning for MoE language models",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
    _add_doctor(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_cancel(commands)
    _add_resume(commands)
    report = commands.add_parser("report", help="summarise a run and plot it")
    report.add_argument("run_dir", metavar="RUN_DIR", help="the directory with metrics.jsonl")
    report.add_argument("--plot", metavar="PNG", help="where the plot goes (default: RUN_DIR/report.png)")
    _add_export(commands)
    _add_verify(commands)
    _add_inspect(commands)
    _add_upcycle(commands.add_parser("upcycle", help="make a dense Llama a mixture of experts (Mixtral's shape)"))
    return parser


def _command(commands: Any, name: str, what: str, description: str, examples: Iterable[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_doctor(commands: Any) -> None:
    parser = _command(
        commands,
        "doctor",
        "look for what would keep a run from working here, and say how to mend it",
        "Looks at Python and the pinned packages, GPUs and their driver, memory, limits of processes, network, ports,\n"
        "file systems, what dead runs left, and Slurm where it is here; with overrides also at what that run needs.\n"
        "It starts and submits nothing, writes only temporary files, and takes some ten seconds at most. Inside a\n"
        "Slurm job it looks at the node. Lines are ok, warning or failed; the exit code is 1 where something failed.",
        (
            "rlhpc doctor                                     this machine",
            "rlhpc doctor experiment=qwen3_30b_a3b_grpo cluster=h200 launch=slurm actor_rollout_ref.model.path=DIR ...",
            "srun -p gpu --gpus-per-node=8 rlhpc doctor --gpu     a node: a GPU has to be there",
            "rlhpc doctor --json | jq '.[] | select(.level == \"failed\")'",
        ),
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a run, as launch/run.py takes it")
    parser.add_argument("--slurm", action="store_true", help="Slurm has to be here (else it may be missing)")
    parser.add_argument("--gpu", action="store_true", help="a GPU has to be here (else it may be missing)")
    parser.add_argument("--json", action="store_true", help="a list of objects: part, check, level, found, fix")


def _add_status(commands: Any) -> None:
    parser = _command(
        commands,
        "status",
        "how runs are: queue, step, reward, checkpoint, time left",
        "What Slurm says of a run, in words, and what the run has written: attempt, phase, step, reward, the newest\n"
        "checkpoint and its age, the time left by the last steps, and how earlier attempts ended. Local runs too.",
        (
            "rlhpc status                          every run under outputs/, and yours in the queue",
            "rlhpc status outputs/rlhpc/default    one run, with its attempts",
            "rlhpc status 2781                     by job id; 2781_3 is one task of an array",
            "rlhpc status --json | jq '.[] | select(.state == \"failed\") | .run_dir'",
            "watch -n 10 rlhpc status",
        ),
    )
    parser.add_argument("run", nargs="?", metavar="RUN|JOB", help=f"{RUN}; without it, all")
    parser.add_argument("--json", action="store_true", help="a list of objects, times in seconds")


def _add_logs(commands: Any) -> None:
    parser = _command(
        commands,
        "logs",
        "what a run printed, and with -f what it prints",
        "The job's output over all attempts: driver and supervisors, each line behind its node's number. Where the\n"
        "last attempt failed, what failed first comes first.",
        (
            "rlhpc logs -f outputs/rlhpc/default       until the run has ended, also when it waits in between",
            "rlhpc logs -n 50 2781                     the last 50 lines",
            "rlhpc logs --rank 3 outputs/rlhpc/default",
            "rlhpc logs --node n2 --ray 2781           Ray's daemons on one node, after a failed attempt",
        ),
    )
    parser.add_argument("run", metavar="RUN|JOB", help=RUN)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    parser.add_argument("-n", "--lines", type=_count, metavar="N", help="begin N lines before the end (default: all, "
                        "with -f 200)")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=_count, metavar="R", help="what rank R wrote")
    which.add_argument("--ray", action="store_true", help="what Ray's daemons wrote")
    parser.add_argument("--node", metavar="N", help="only of this node: its number in the job, or its name")


def _add_cancel(commands: Any) -> None:
    parser = _command(
        commands,
        "cancel",
        "end a run so that nothing starts it again",
        "A run under way commits a checkpoint and ends; it is not requeued. `rlhpc resume` goes on with it.",
        (
            "rlhpc cancel outputs/rlhpc/default",
            "rlhpc cancel 2781           all tasks of an array; 2781_3 one of them",
            "rlhpc cancel --now 2781     at once, what came after the last checkpoint is lost",
        ),
    )
    parser.add_argument("run", metavar="RUN|JOB", help=RUN)
    parser.add_argument("--now", action="store_true", help="kill it, without a checkpoint")


def _add_resume(commands: Any) -> None:
    parser = _command(
        commands,
        "resume",
        "go on with a run, as it was or with something changed",
        "Submits a run again, or goes on with it here, the way it was started; shows what the overrides change and\n"
        "refuses those that would make it another run. Takes back `rlhpc cancel`.",
        (
            "rlhpc resume outputs/rlhpc/default",
            "rlhpc resume outputs/rlhpc/default trainer.total_training_steps=200 launch.time_min=600",
            "rlhpc resume outputs/rlhpc/default launch.dry_run=true",
        ),
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or a job's id")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as launch/run.py takes them")


def _add_export(commands: Any) -> None:
    parser = _command(
        commands,
        "export",
        "write a checkpoint's model as a Hugging Face directory",
        "Makes OUT: the weights as safetensors, and the config, tokenizer and generation config of the model that the\n"
        "run began with. Transformers, vLLM and whatever else reads such directories load it. OUT appears when it is\n"
        "complete. Memory holds one file of OUT at a time, whatever the layout saved; what is read is verified.",
        (
            "rlhpc export outputs/rlhpc/default models/mine                     the newest checkpoint",
            "rlhpc export outputs/rlhpc/default models/mine --step 40 --dtype bfloat16",
            "rlhpc export step-000040 models/mine --model Qwen3-30B-A3B         a checkpoint without its run",
        ),
    )
    _add_checkpoint(parser, "which to export (default: the newest)")
    parser.add_argument("target", metavar="OUT", type=Path, help="the directory to make; it may exist if it is empty")
    dtype = "of the weights (default: what the run trained in, else what the config says)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=dtype)
    size = "of a file, at most, unless a single tensor is larger: 500MB, 5GB, 4GiB (%(default)s)"
    parser.add_argument("--shard-size", type=num_bytes, default="5GB", metavar="SIZE", help=size)
    model = "a model directory to take the tokenizer and, without a run, the config from (default: the run's)"
    parser.add_argument("--model", type=Path, metavar="DIR", help=model)


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands,
        "verify",
        "read checkpoints whole and compare all checksums",
        "Reads every byte of one or all checkpoints, from the disk rather than from memory, and names each file and\n"
        "chunk that is damaged. Exit code 1 where something is.",
        (
            "rlhpc verify outputs/rlhpc/default              every checkpoint of a run",
            "rlhpc verify outputs/rlhpc/default --step 40    one of them",
            "rlhpc verify /archive/step-000040               a copy",
        ),
    )
    _add_checkpoint(parser, "which to verify (default: all)")


def _add_inspect(commands: Any) -> None:
    parser = _command(
        commands,
        "inspect",
        "what checkpoints hold: steps, layouts, sizes, tensors",
        "A line for each checkpoint of a run; of a single one, all that its manifest says, and with --tensors a line\n"
        "for each tensor. Reads manifests alone.",
        (
            "rlhpc inspect outputs/rlhpc/default                                    all checkpoints",
            "rlhpc inspect outputs/rlhpc/default --step 40",
            "rlhpc inspect outputs/rlhpc/default --step 40 --tensors '*.layers.0.*'   of the first layer",
            "rlhpc inspect outputs/rlhpc/default --json | jq '.[-1].size_bytes'",
        ),
    )
    _add_checkpoint(parser, "which to show (default: all, with --tensors the newest)")
    tensors = "list the tensors whose names match, as in a shell; all without a pattern"
    parser.add_argument("--tensors", nargs="?", const="*", metavar="PATTERN", help=tensors)
    parser.add_argument("--json", action="store_true", help="a list of objects, sizes in bytes, times in seconds")


def _add_checkpoint(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("checkpoint", metavar="RUN|STEPDIR", help=CHECKPOINT)
    parser.add_argument("--step", type=_count, metavar="N", help=what)


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


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def num_bytes(text: str) -> int:
    """A size such as 500MB (decimal, as Hugging Face means it), 4GiB or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not (size := int(float(match[1]) * unit)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB, 5GB, 4GiB or a number of bytes")
    return size

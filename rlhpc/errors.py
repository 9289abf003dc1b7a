"""Errors a user can cause or must hear of. Each message says what, got, allowed and the fix."""

import sys
from collections.abc import Iterable


class RlhpcError(Exception):
    """Base of all errors that rlhpc raises on purpose; the command line prints them without a traceback and ends with
    `exit_code`: 2 for what the user can mend before trying again, 1 for what went wrong while it ran."""

    exit_code = 2


class ConfigError(RlhpcError):
    """The configuration is wrong or contradicts the model, the data or the machine."""


class DataError(RlhpcError):
    """A data file or row can't be used."""


class ModelError(RlhpcError):
    """A model directory can't be used: unknown family, missing or truncated files, unsupported option."""


class CheckpointError(RlhpcError):
    """A checkpoint can't be written or read."""


class EngineError(RlhpcError):
    """The rollout engine broke a promise, such as tensor-parallel ranks that sampled different tokens."""

    exit_code = 1


class TrainingError(RlhpcError):
    """Training can't go on, such as a non-finite loss."""

    exit_code = 1


class ExhaustedError(TrainingError):
    """The prompts gave nothing to train on. No weight has changed in this step: the state before it counts."""


class SlurmError(RlhpcError):
    """A command of Slurm failed or gave no answer; the message holds the command, its exit code and what it said."""


class ClusterError(RlhpcError):
    """The nodes don't make a cluster: one never joined, Ray ended, no port is free. Another attempt may get further."""

    exit_code = 1


class RankLostError(ClusterError):
    """A rank or its node died without an answer: killed, out of memory, powered off. Another try may get further."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raises ConfigError that says each of them once, one a line; where there are none, nothing."""
    if lines := dict.fromkeys(problems):
        raise ConfigError("\n".join(lines))


def print_error(error: Exception) -> None:
    """To standard error, without a traceback; a node's supervisor knows the driver's last words by how they begin."""
    for line in filter(None, str(error).splitlines()):
        print(f"error: {line}", file=sys.stderr)

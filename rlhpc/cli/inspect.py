"""`rlhpc inspect`: what checkpoints hold, from their manifests alone."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import isfinite, nan, prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhpc.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from rlhpc.checkpoint.pieces import CRITIC_PREFIX, ITEM_BYTES
from rlhpc.cli.checkpoints import find
from rlhpc.cli.status import PIPED_WIDTH
from rlhpc.cli.wording import clock
from rlhpc.errors import CheckpointError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.memory.state import readable
from rlhpc.metrics.console import duration

AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")


@dataclass(frozen=True)
class Tensor:
    """A canonical tensor: what is stored of it, by kind. `pieces` counts its boxes, those that several ranks stored
    alike included, and `size_bytes` their bytes."""

    name: str
    shape: list[int]
    dtypes: dict[str, str]
    pieces: int
    ranks: int
    size_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's facts; where it has no manifest that can be read, `problem` says why and the others are empty."""

    directory: str
    step: int
    problem: str | None
    age_s: float
    policy_version: int | None
    world_size: int
    layout: dict[str, Any]
    size_bytes: int
    files: int
    parameters: int
    tensors: int
    bytes_by_kind: dict[str, int]
    config_digest: str | None
    validation: dict[str, float | None]  # the step's metrics that begin with val-core/; None: not finite
    missing: list[str]  # files that are absent or of another size than the manifest says
    critic_parameters: int = 0  # beside the policy's `parameters`


def inspect(argument: str, step: int | None = None, *, pattern: str | None = None, as_json: bool = False) -> None:
    """Prints the checkpoints that RUN|STEPDIR means, or with `pattern` the tensors of one: the newest unless `step`
    says which. Raises CheckpointError and ConfigError where there is nothing to show."""
    found = find(argument, step)
    if pattern is not None:
        listed = list(tensors(read_manifest(found.newest), pattern))
        if not listed:
            raise CheckpointError(f"no tensor of {found.newest} matches {pattern!r}; see all with: --tensors")
        if as_json:
            print(json.dumps([asdict(tensor) for tensor in listed], indent=1))
        else:
            _print(tensor_table(listed))
        return
    checkpoints = [look(number, directory) for number, directory in found.steps.items()]
    if as_json:
        print(json.dumps([asdict(checkpoint) for checkpoint in checkpoints], indent=1))
    elif len(checkpoints) == 1:
        for line in details(checkpoints[0]):
            print(line)
    else:
        _print(table(checkpoints))


def look(step: int, directory: Path) -> Checkpoint:
    """One checkpoint's facts."""
    try:
        manifest = read_manifest(directory)
        age = time.time() - (directory / MANIFEST_NAME).stat().st_mtime
    except (CheckpointError, OSError) as error:
        return Checkpoint(str(directory), step, str(error), 0.0, None, 0, {}, 0, 0, 0, 0, {}, None, {}, [])
    by_kind: Counter[str] = Counter()
    for run in (run for entry in manifest.files for run in entry.runs):
        elements = sum(box.num_elements for box in run.boxes)
        for section in run.sections:
            by_kind[section.kind] += elements * ITEM_BYTES[section.dtype]
    record: Mapping[str, Any] = manifest.state.get("train", {}).get("record", {})
    return Checkpoint(
        directory=str(directory),
        step=manifest.step,
        problem=None,
        age_s=age,
        policy_version=manifest.policy_version,
        world_size=manifest.world_size,
        layout=dict(manifest.layout),
        size_bytes=manifest.size_bytes,
        files=len(manifest.files),
        parameters=sum(prod(shape) for name, shape in manifest.shapes.items() if not name.startswith(CRITIC_PREFIX)),
        critic_parameters=sum(prod(shape) for name, shape in manifest.shapes.items() if name.startswith(CRITIC_PREFIX)),
        tensors=len(manifest.shapes),
        bytes_by_kind={kind: by_kind[kind] for kind in manifest.kinds},
        config_digest=manifest.config_digest or None,
        validation={
            name: value if isfinite(value) else None for name, value in record.items() if name.startswith("val-core/")
        },
        missing=[entry.name for entry in manifest.files if _size(directory / entry.name) != entry.size_bytes],
    )


def tensors(manifest: CheckpointManifest, pattern: str) -> Iterator[Tensor]:
    """The canonical tensors whose names match, in the manifest's order."""
    dtypes: dict[str, dict[str, str]] = defaultdict(dict)
    pieces: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    ranks: dict[str, set[int]] = defaultdict(set)
    names = {name for name in manifest.shapes if fnmatchcase(name, pattern)}
    for piece in (piece for kind in manifest.kinds for piece in manifest.pieces(kind, names)):
        dtypes[piece.name][piece.kind] = piece.dtype
        pieces[piece.name] += 1
        num_bytes[piece.name] += piece.num_bytes
        ranks[piece.name].add(piece.rank)
    for name in (name for name in manifest.shapes if name in names):
        yield Tensor(name, list(manifest.shapes[name]), dtypes[name], pieces[name], len(ranks[name]), num_bytes[name])


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def table(checkpoints: Sequence[Checkpoint]) -> Table:
    """A line each."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("step", "age", "size", "ranks"):
        made.add_column(header, justify="right")
    for header in ("layout", "validation", "state"):
        made.add_column(header, overflow="fold")
    for one in checkpoints:
        if one.problem:
            made.add_row(str(one.step), "-", "-", "-", "-", "-", one.problem, style="bold red")
        else:
            scores = ", ".join(f"{nan if value is None else value:.4g}" for value in one.validation.values())
            made.add_row(
                str(one.step), duration(one.age_s), readable(one.size_bytes), str(one.world_size),
                layout_text(one.layout), scores or "-", _state(one), style="bold red" if one.missing else None,
            )  # fmt: skip
    return made


def details(one: Checkpoint) -> Iterator[str]:
    """All facts of a checkpoint, line by line."""
    yield one.directory
    if one.problem:
        yield f"  UNREADABLE  {one.problem}"
        return
    yield f"  step        {one.step}, policy version {one.policy_version}"
    yield f"  written     {clock(time.time() - one.age_s)}, {duration(one.age_s)} ago"
    yield f"  layout      {one.world_size} ranks: {layout_text(one.layout)}"
    of_critic = f", and a critic's {one.critic_parameters:,}," if one.critic_parameters else ""
    yield f"  model       {one.parameters:,} parameters{of_critic} in {one.tensors:,} tensors"
    yield f"  size        {readable(one.size_bytes)} in {one.files} files"
    for kind, num_bytes in one.bytes_by_kind.items():
        yield f"    {kind:<10}{readable(num_bytes):>10}"
    if one.config_digest:
        yield f"  config      {one.config_digest}"
    for name, value in one.validation.items():
        yield f"  validation  {name} {nan if value is None else value:.4g}"
    yield f"  state       {_state(one)}{'' if one.missing else ' by its sizes; rlhpc verify compares the checksums'}"


def layout_text(layout: Mapping[str, Any]) -> str:
    """tp=2 ep=4 dp=2: the sizes that aren't one."""
    if not layout:
        return "-"
    grid = ParallelLayout(**layout)
    sizes = {axis: getattr(grid, axis) for axis in AXES}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1 rank"


def tensor_table(listed: Sequence[Tensor]) -> Table:
    """A line each, and their sum."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("tensor", overflow="fold")
    made.add_column("shape")
    made.add_column("stored", overflow="fold")
    for header in ("pieces", "ranks", "size"):
        made.add_column(header, justify="right")
    for one in listed:
        by_dtype: dict[str, list[str]] = defaultdict(list)
        for kind, dtype in one.dtypes.items():
            by_dtype[dtype].append(kind)
        stored = "; ".join(f"{' '.join(kinds)} ({dtype})" for dtype, kinds in by_dtype.items())
        shape = "x".join(map(str, one.shape)) or "scalar"
        made.add_row(one.name, shape, stored, str(one.pieces), str(one.ranks), readable(one.size_bytes))
    total = sum(prod(one.shape) for one in listed)
    summary = f"{len(listed):,} tensors, {total:,} elements"
    pieces, num_bytes = sum(one.pieces for one in listed), sum(one.size_bytes for one in listed)
    made.add_row(summary, "", "", str(pieces), "", readable(num_bytes))
    return made


def _state(one: Checkpoint) -> str:
    if one.missing:
        more = f" and {len(one.missing) - 1} more" if len(one.missing) > 1 else ""
        return f"DAMAGED: {one.missing[0]}{more} missing or of another size"
    return "complete"


def _print(made: Table) -> None:
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH, emoji=False).print(made)

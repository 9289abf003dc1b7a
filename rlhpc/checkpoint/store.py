"""The checkpoints of one run: committed by renaming a complete directory, so that a crash leaves the old or
the new.

    pending = store.begin(step)                                   # driver
    entries = write_shard(pending.directory, rank, pieces, ...)   # every rank
    store.commit(pending, entries, state)                         # driver, after all ranks

docs/checkpoint-format.md describes what is on disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint import durable
from rlhpc.checkpoint.manifest import (
    STEP_NAME,
    CheckpointManifest,
    FileEntry,
    committed_steps,
    read_manifest,
    step_directories,
    write_manifest,
)
from rlhpc.checkpoint.pieces import Index
from rlhpc.checkpoint.retention import retained
from rlhpc.checkpoint.writer import Writer
from rlhpc.errors import CheckpointError

if TYPE_CHECKING:
    import torch

OWNER_NAME = "owner.json"
LATEST_NAME = "latest"
_TEMPORARY = re.compile(r"tmp-(?:delete-)?step-\d{6,}-(?P<writer>.+\.\d+\.\d+(?:@\w+-\d+)?)")

Found = tuple[int, CheckpointManifest | CheckpointError]  # a step, and its manifest or what is wrong with it

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingCheckpoint:
    """A save in progress: the ranks write into `directory`, which nobody reads before it is committed."""

    step: int
    directory: Path


class CheckpointStore:
    """Checkpoints `root/step-000012` of one run. Making a store touches nothing; the first `begin` or
    `acquire` makes this process the root's writer, and a process that was the writer before can never commit
    again. `attempt` is the try of a scheduler's job that this process belongs to, `<job>-<restart count>`."""

    def __init__(self, root: str | os.PathLike[str], attempt: str = "") -> None:
        self.root = Path(root)
        self._writer = Writer.current(attempt)
        self._acquired = False
        self._distrusted: dict[int, str] = {}  # why, by step
        self._scores: dict[int, float | None] = {}  # what `retain` ranks by, of complete steps

    # Reading

    def steps(self) -> list[int]:
        """Committed steps, ascending; a damaged one is among them as long as it has a manifest."""
        return list(committed_steps(self.root))

    def load(self, step: int, *, checksums: bool = True) -> CheckpointManifest:
        """The manifest of a step whose files all verify: sizes and checksums, or sizes alone where reading
        everything takes too long. Raises CheckpointError naming the file and the reason."""
        if step in self._distrusted:
            raise CheckpointError(self._distrusted[step])
        directory = self._directory(step)
        if not directory.is_dir():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.root}; committed steps: {known}")
        manifest = read_manifest(directory)
        manifest.verify(checksums=checksums)
        return manifest

    def has(self, step: int, *, checksums: bool = True) -> bool:
        """Whether the step is committed and all of it verifies, as `load` says."""
        try:
            self.load(step, checksums=checksums)
        except CheckpointError:
            return False
        return True

    def newest_first(self) -> Iterator[Found]:
        """Every step with its manifest, or with what is wrong with it, looking at sizes alone (see `load`)."""
        for step in reversed(step_directories(self.root)):
            try:
                yield step, self.load(step, checksums=False)
            except CheckpointError as error:
                yield step, error

    def distrust(self, step: int, reason: str) -> None:
        """From now on this step counts as damaged, as one does in which a reader met a wrong checksum: sizes alone
        don't tell. A save of the same step replaces it."""
        self._distrusted[step] = reason

    # Writing

    def acquire(self) -> None:
        """Makes this process the writer of the root. An earlier try of the same job has to give way, whether it
        lives or not. Raises CheckpointError when another process on this host lives, and when this one was the
        writer before or is itself the earlier try."""
        if self._acquired:
            return self.require_ownership()
        durable.make_directory(self.root)
        owner = self._owner()
        if owner and owner.supersedes(self._writer):
            raise CheckpointError(self._lost_to(owner))
        if owner and owner != self._writer and owner.is_alive() and not self._writer.supersedes(owner):
            raise CheckpointError(
                f"{self.root} is being written by process {owner.pid} on {owner.host}; stop that run or "
                f"choose another run_dir"
            )
        text = json.dumps(asdict(self._writer))

        def write(path: Path) -> None:
            path.write_text(text)

        durable.publish_file(self.root / OWNER_NAME, write)
        self._acquired = True

    def require_ownership(self) -> None:
        """Raises CheckpointError when another process has become the writer since `acquire`."""
        if (owner := self._owner()) != self._writer:
            raise CheckpointError(self._lost_to(owner))

    def _lost_to(self, owner: Writer | None) -> str:
        newer = (
            f"{f'attempt {owner.attempt}, ' if owner.attempt else ''}process {owner.pid} on {owner.host}"
            if owner
            else "nobody"
        )
        return f"{self.root} now belongs to another run ({newer}); this one must not publish anything more"

    def ensure_space(self, num_bytes: int, num_files: int = 1) -> None:
        """Raises DiskFullError, telling needed and free, unless the root's file system has room for a
        save."""
        durable.make_directory(self.root)
        durable.ensure_space(self.root, num_bytes, num_files)

    def begin(self, step: int) -> PendingCheckpoint:
        """Opens a save of `step` and removes what dead writers left. Raises CheckpointError when the step is
        already committed and complete, another live process writes here, or storage fails; DiskFullError where it is
        full."""
        directory = self._temporary(step)
        try:
            self.acquire()
            self._sweep()
            if self.has(step):  # a damaged one is replaced by commit
                raise CheckpointError(
                    f"step {step} is already committed in {self.root}; resume from it, or drop it and what "
                    f"follows with discard_after({step - 1})"
                )
            if directory.exists():  # an earlier attempt of this very process
                shutil.rmtree(directory)
            directory.mkdir()
        except OSError as error:
            durable.raise_write_error(error, directory, 0)
        return PendingCheckpoint(step, directory)

    def commit(
        self,
        pending: PendingCheckpoint,
        entries: Iterable[FileEntry],
        state: Mapping[str, Any],
        *,
        policy_version: int | None = None,
        layout: Mapping[str, Any] | None = None,
        config_digest: str = "",
    ) -> CheckpointManifest:
        """Publishes a save into which every rank has written. `state` and `layout` must be JSON (tuples come
        back as lists); `policy_version` is the step unless given. Raises CheckpointError and abandons the save when
        a rank's file or a part of a tensor is missing, the disk is full or another process has become the writer."""
        try:
            self.require_ownership()
            manifest = self._complete(pending, tuple(entries), state, policy_version, layout or {}, config_digest)
            self.require_ownership()
            final = self._directory(pending.step)
            if final.exists():  # damaged, or begin would have refused
                self._delete(final)
            os.rename(pending.directory, final)
            durable.fsync(self.root)
            self._distrusted.pop(pending.step, None)
            self._scores.pop(pending.step, None)
        except CheckpointError:
            self.abandon(pending)
            raise
        except OSError as error:
            self.abandon(pending)
            durable.raise_write_error(error, self._directory(pending.step), 0)
        self._point()
        return replace(manifest, directory=final)

    def abandon(self, pending: PendingCheckpoint) -> None:
        """Removes an uncommitted save, such as one for which a rank ran out of disk. Committed ones are
        untouched."""
        shutil.rmtree(pending.directory, ignore_errors=True)

    def save(
        self,
        step: int,
        shards: Sequence[tuple[Mapping[str, torch.Tensor], Mapping[str, object]]],
        state: Mapping[str, Any],
        **manifest_fields: Any,
    ) -> CheckpointManifest:
        """Begins, writes the ranks' own state `shards[rank] = (tensors, scalars)` and commits, all in this process.
        Raises like each."""
        from rlhpc.checkpoint.shards import write_shard  # torch, which those who only look don't need

        num_bytes = sum(tensor.nbytes for tensors, _ in shards for tensor in tensors.values())
        self.ensure_space(num_bytes, 2 + len(shards))
        pending = self.begin(step)
        try:
            entries = [
                entry
                for rank, (tensors, scalars) in enumerate(shards)
                for entry in write_shard(pending.directory, rank, [], {}, tensors, scalars)
            ]
        except CheckpointError:
            self.abandon(pending)
            raise
        return self.commit(pending, entries, state, **manifest_fields)

    def retain(
        self,
        newest: int,
        *,
        every: int = 0,
        best: int = 0,
        mode: str = "max",
        score: Callable[[CheckpointManifest], float | None] = lambda manifest: None,
    ) -> list[int]:
        """Deletes the checkpoints that `retained` doesn't keep. Only complete ones count (sizes decide); damaged ones
        stay for a human to look at until they are older than the newest that must stay. Returns the deleted steps; what
        storage doesn't let go of now is warned of, and tried again by the next call."""
        self.acquire()
        steps = list(step_directories(self.root))
        whole: list[int] = []
        for step in reversed(steps):
            if len(whole) < newest:
                self._scores.pop(step, None)  # these are looked at anew, every time
            elif not best:
                break
            try:
                if step not in self._scores:
                    self._scores[step] = score(self.load(step, checksums=False))
            except CheckpointError:
                continue
            whole.append(step)
        scores = {step: value for step in whole if (value := self._scores[step]) is not None}
        kept = retained(steps, whole, scores, newest=newest, every=every, best=best, mode=mode)
        deleted = []
        for step in (step for step in reversed(steps) if step not in kept):  # newest first: a crash leaves no gap
            try:
                self._delete(self._directory(step))
            except OSError as error:
                logger.warning("checkpoint of step %d need not stay, but can't be deleted: %s", step, error)
                continue
            deleted.append(step)
            self._scores.pop(step, None)
        return deleted

    def discard_after(self, step: int) -> list[int]:
        """Deletes checkpoints newer than `step`: a run that goes on from an older one leaves them behind,
        and a later restart must not find them. -1 deletes all. Returns the deleted steps. Raises CheckpointError when
        one can't be deleted."""
        self.acquire()
        newer = [other for other in reversed(step_directories(self.root)) if other > step]
        for other in newer:  # newest first, so that a crash in between leaves no gap
            try:
                self._delete(self._directory(other))
            except OSError as error:
                raise CheckpointError(f"can't delete {self._directory(other)}: {error.strerror}; delete it") from error
        self._point()
        return newer

    def _complete(
        self,
        pending: PendingCheckpoint,
        entries: tuple[FileEntry, ...],
        state: Mapping[str, Any],
        policy_version: int | None,
        layout: Mapping[str, Any],
        config_digest: str,
    ) -> CheckpointManifest:
        """Checks that the ranks 0..N-1 wrote what they say, and all of each tensor, and adds the manifest, the last
        file of a save."""
        ranks = {entry.rank for entry in entries}
        if not ranks or ranks != set(range(len(ranks))):
            missing = sorted(set(range(max(ranks, default=0) + 1)) - ranks)
            raise CheckpointError(f"step {pending.step}: no files of ranks {missing}; every rank must write its shard")
        manifest = CheckpointManifest(
            directory=pending.directory,
            step=pending.step,
            policy_version=pending.step if policy_version is None else policy_version,
            files=tuple(sorted(entries, key=lambda entry: entry.name)),
            layout=layout,
            state=state,
            shapes=_shapes(pending.step, entries),
            config_digest=config_digest,
        )
        manifest.require_whole()
        manifest.verify(checksums=False)
        write_manifest(manifest)
        return manifest

    def _directory(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def _point(self) -> None:
        """Names the newest committed step in a file, for shells and people. Nothing here reads it: after a crash it may
        be an older one's name."""
        newest = max(self.steps(), default=None)
        path = self.root / LATEST_NAME
        try:
            if newest is None:
                path.unlink(missing_ok=True)
            else:
                durable.publish_file(path, lambda partial: _write_line(partial, self._directory(newest).name))
        except (CheckpointError, OSError) as error:
            logger.warning("%s doesn't tell of step %s: %s", path, newest, error)

    def _temporary(self, step: int, prefix: str = "") -> Path:
        return self.root / f"tmp-{prefix}step-{step:06d}-{self._writer}"

    def _owner(self) -> Writer | None:
        if OWNER_NAME not in os.listdir(self.root):  # makes an NFS client look for what another node has renamed
            return None
        try:
            return Writer(**json.loads((self.root / OWNER_NAME).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.root / OWNER_NAME} is damaged ({error}); delete it") from error

    def _delete(self, directory: Path) -> None:
        """Renames first, so that a crash in the middle leaves no half-deleted checkpoint under a committed
        name."""
        match = STEP_NAME.fullmatch(directory.name)
        assert match, directory
        doomed = self._temporary(int(match[1]), "delete-")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(directory, doomed)
        durable.fsync(self.root)
        shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes temporary directories of writers that are dead or have to give way."""
        for path in self.root.iterdir():
            if match := _TEMPORARY.fullmatch(path.name):
                writer = Writer.parse(match["writer"])
                if self._writer.supersedes(writer) or not writer.is_alive(path):
                    shutil.rmtree(path, ignore_errors=True)


def _write_line(path: Path, text: str) -> None:
    path.write_text(text + "\n")


def _shapes(step: int, entries: Iterable[FileEntry]) -> dict[str, Index]:
    """Of all canonical tensors. Raises CheckpointError when ranks disagree."""
    shapes: dict[str, Index] = {}
    for entry in entries:
        for name, shape in entry.shapes.items():
            if shapes.setdefault(name, shape) != shape:
                raise CheckpointError(f"step {step}: {name} has shape {shapes[name]}, but {shape} on rank {entry.rank}")
    return shapes

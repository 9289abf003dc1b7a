"""`rlhpc verify`: reads checkpoints whole, from the disk, and compares every checksum."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from shlex import quote
from threading import Event

from rlhpc.checkpoint.chunks import chunk_checksums, drop_cached
from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry, read_manifest
from rlhpc.cli.checkpoints import byte_progress, find
from rlhpc.errors import CheckpointError
from rlhpc.memory.state import readable

NUM_READERS = min(16, max(2, os.cpu_count() or 1))  # files at once; hashing keeps a core busy


class DamagedError(CheckpointError):
    """A checkpoint isn't what was written."""

    exit_code = 1


def verify(argument: str, step: int | None = None) -> None:
    """Verifies the checkpoints that RUN|STEPDIR means and prints a line for each, and one for every damaged file and
    chunk.

    Raises DamagedError where there is one, and CheckpointError and ConfigError where there is nothing to verify.
    """
    found = find(argument, step)
    begin, num_bytes = time.monotonic(), 0
    deleted, damaged = [], []
    for number, directory in found.steps.items():
        try:
            manifest = read_manifest(directory)
            problems = verify_files(manifest)
            state = f"{'DAMAGED' if problems else 'ok'}, {readable(manifest.size_bytes)} in {len(manifest.files)} files"
            num_bytes += manifest.size_bytes
        except CheckpointError as error:
            problems, state = [str(error)], "UNREADABLE"
        if not directory.exists():
            print(f"step {number}: deleted meanwhile")
            deleted.append(number)
            continue
        print(f"step {number}: {state}", *problems, sep="\n  ", flush=True)
        if problems:
            damaged.append(number)
    if len(deleted) == len(found.steps):
        raise CheckpointError("all of them were deleted meanwhile, as checkpoint.keep asks; verify the newer ones")
    seconds = time.monotonic() - begin
    print(f"{readable(num_bytes)} in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.2f} GB/s")
    if damaged:
        told = f"{len(damaged)} of {len(found.steps)} checkpoints can't be used: step {', '.join(map(str, damaged))}"
        if found.run:
            told += f"; the run goes on from the newest that can: rlhpc resume {quote(str(found.run.directory))}"
        raise DamagedError(told)


def verify_files(manifest: CheckpointManifest) -> list[str]:
    """What is wrong with each damaged file or chunk, in order; all files are read, several at a time."""
    with byte_progress() as progress, ThreadPoolExecutor(NUM_READERS) as pool:
        task = progress.add_task(f"step {manifest.step}", total=manifest.size_bytes)

        def advance(num_bytes: int) -> None:
            progress.advance(task, num_bytes)

        leaving = Event()
        try:
            found = pool.map(lambda entry: list(_problems(manifest.directory, entry, advance, leaving)), manifest.files)
            return [problem for problems in found for problem in problems]
        finally:
            leaving.set()  # Ctrl-C need not wait for whole files


def _problems(directory: Path, entry: FileEntry, advance: Callable[[int], None], leaving: Event) -> Iterator[str]:
    path = directory / entry.name
    try:
        entry.verify(directory, checksums=False)  # there, and of the right size
        with path.open("rb") as file:
            drop_cached(file.fileno())
            found = chain(chunk_checksums(path, entry.chunk_bytes, advance), repeat("none"))  # of one cut meanwhile
            for chunk, checksum in zip(range(len(entry.checksums)), found, strict=False):
                try:
                    entry.compare(directory, chunk, checksum)
                except CheckpointError as error:
                    yield str(error)
                if leaving.is_set():
                    return
            drop_cached(file.fileno())
    except CheckpointError as error:
        yield str(error)
    except OSError as error:  # a sector that can't be read
        yield f"{path}: {error.strerror}"

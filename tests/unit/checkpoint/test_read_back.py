"""A device that gives back something else than was written: found before the file counts as written."""

import sys
from itertools import count
from pathlib import Path

import pytest

from rlhpc.checkpoint.store import PendingCheckpoint
from rlhpc.errors import CheckpointError
from tests.unit.checkpoint.saves import at_disk_call, write_rank


def test_a_byte_that_changes_on_the_device_is_found(tmp_path: Path) -> None:
    """A byte of what is in the partial file flips before every call of the save that touches a disk, in turn."""
    flipped: list[Path] = []
    errors, unseen = [], 0

    def flip() -> None:
        for path in tmp_path.glob("*/*.partial"):
            with path.open("r+b", buffering=0) as file:
                if data := file.read():
                    file.seek(0)
                    file.write(bytes([data[0] ^ 1]))
                    flipped.append(path)

    for call in count():
        directory = tmp_path / str(call)
        directory.mkdir()
        before = len(flipped)
        at_disk_call(call, flip)
        try:
            entries = write_rank(PendingCheckpoint(1, directory), 0, read_back=True)
        except CheckpointError as error:
            errors.append(str(error))
            assert not list(directory.glob("*.partial"))
            continue
        finally:
            sys.setprofile(None)
        if len(flipped) == before:
            for entry in entries:
                entry.verify(directory)
            if call > 30:
                break
        else:  # after it was read back: what verifies later finds it
            unseen += 1
            with pytest.raises(CheckpointError, match="chunk 0 has xxh3"):
                [entry.verify(directory) for entry in entries]
    assert len(errors) == 4  # of two files each: before the fsync, and before it is opened to be read
    assert unseen == 6  # before the second fsync's opening, that fsync, and the rename
    assert all("safetensors.partial: the device gives back chunk 0 with xxh3" in error for error in errors)

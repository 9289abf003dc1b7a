"""Byte ranges come back as written, from verified chunks only; whatever is damaged is found and named."""

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.checkpoint.chunks import ChunkWriter
from rlhpc.checkpoint.durable import FULL, DiskFullError, lags, patiently, raise_write_error
from rlhpc.checkpoint.manifest import MANIFEST_NAME, FileEntry, read_manifest
from rlhpc.checkpoint.reader import ChunkReader
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError
from tests.unit.checkpoint.saves import save

DATA = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8).tobytes()
CHUNK = 96  # ten chunks and a rest of 40 bytes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileEntry]:
    directory = tmp_path_factory.mktemp("file")
    checksums = tuple(xxhash.xxh3_64_hexdigest(DATA[i : i + CHUNK]) for i in range(0, len(DATA), CHUNK))
    (directory / "f").write_bytes(DATA)
    return directory, FileEntry("f", 0, len(DATA), checksums, CHUNK)


bounds = st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(sorted)


@given(ranges=st.lists(st.tuples(bounds, st.booleans()), max_size=8), shared=st.booleans())
def test_any_ranges_from_the_chunks_that_they_touch(written, ranges, shared) -> None:
    directory, entry = written
    reader = ChunkReader(directory, entry, bytearray(200) if shared else None)
    filled = [bytearray(end - begin) for (begin, end), _ in ranges]
    sinks = []
    for ((begin, end), by_call), target in zip(ranges, filled, strict=True):

        def take(position: int, part: memoryview, target: bytearray = target) -> None:
            target[position : position + len(part)] = part

        sinks.append((begin, end, take if by_call else memoryview(target)))
    reader.read(sinks)
    assert [bytes(target) for target in filled] == [DATA[begin:end] for (begin, end), _ in ranges]
    touched = {position // CHUNK for (begin, end), _ in ranges for position in range(begin, end)}
    assert reader.bytes_read == sum(min(CHUNK, len(DATA) - chunk * CHUNK) for chunk in touched)


def test_many_small_ranges_and_a_long_one(tmp_path: Path) -> None:
    """More than a system call takes at once, in number and in bytes."""
    data = np.random.default_rng(1).integers(0, 256, 9 * 2**20 + 5, dtype=np.uint8).tobytes()
    (tmp_path / "f").write_bytes(data)
    bounds = [(i * 100, i * 100 + 99) for i in range(3000)] + [(300_001, len(data))]
    filled = [bytearray(end - begin) for begin, end in bounds]
    reader = ChunkReader(tmp_path, FileEntry("f", 0, len(data), (xxhash.xxh3_64_hexdigest(data),)))
    reader.read((*bound, memoryview(target)) for bound, target in zip(bounds, filled, strict=True))
    assert filled == [data[begin:end] for begin, end in bounds] and reader.bytes_read == len(data)


def test_only_what_is_read_is_verified(written, tmp_path: Path) -> None:
    directory, entry = written
    data = bytearray(DATA)
    data[2 * CHUNK + 5] ^= 1
    (tmp_path / "f").write_bytes(data)
    reader, target = ChunkReader(tmp_path, entry), bytearray(CHUNK)
    reader.read([(0, CHUNK, memoryview(target)), (3 * CHUNK, 4 * CHUNK, memoryview(target))])
    assert bytes(target) == DATA[3 * CHUNK : 4 * CHUNK]
    got = xxhash.xxh3_64_hexdigest(data[2 * CHUNK : 3 * CHUNK])
    reason = f"{tmp_path}/f: chunk 2 has xxh3 {got}, the manifest says {entry.checksums[2]}"
    called = []
    with pytest.raises(CheckpointError, match=reason):
        reader.read([(3 * CHUNK - 1, 3 * CHUNK + 1, lambda *part: called.append(part))])
    assert not called
    (tmp_path / "f").write_bytes(DATA[:500])
    with pytest.raises(CheckpointError, match=f"{tmp_path}/f: 500 bytes, the manifest says 1000"):
        reader.read([(490, 510, memoryview(bytearray(20)))])
    (tmp_path / "f").unlink()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/f: No such file"):
        reader.read([(0, 1, memoryview(bytearray(1)))])


@given(sizes=st.lists(st.integers(0, 250), max_size=40))
def test_what_is_written_in_parts_is_the_whole(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "parts"
    data = (DATA * 11)[: sum(sizes)]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    writer, begin = ChunkWriter(fd, CHUNK), 0
    for size in sizes:
        writer.append(memoryview(data)[begin : begin + size])
        begin += size
    checksums = writer.finish()
    os.close(fd)
    assert path.read_bytes() == data
    assert checksums == tuple(xxhash.xxh3_64_hexdigest(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    manifest = read_manifest(tmp_path / "step-000001")
    for entry in (None, *manifest.files):
        path = manifest.directory / (entry.name if entry else MANIFEST_NAME)
        data = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(data):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), position)
                with pytest.raises(CheckpointError) as caught:
                    entry.verify(manifest.directory) if entry else read_manifest(manifest.directory)
                where = f"chunk {position // 600} has xxh3" if entry else ""
                assert str(caught.value).startswith(f"{path}: {where}"), position
                os.pwrite(file.fileno(), bytes([byte]), position)
    read_manifest(manifest.directory).verify()


def test_swapped_files_are_found(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    first, second = (tmp_path / f"step-000001/rank-0000{rank}-0000.safetensors" for rank in (0, 1))
    assert first.stat().st_size == second.stat().st_size
    shutil.move(first, tmp_path / "kept")
    shutil.move(second, first)
    shutil.move(tmp_path / "kept", second)
    with pytest.raises(CheckpointError, match=f"{first}: chunk 0 has xxh3"):
        CheckpointStore(tmp_path).load(1)


def test_late_files_are_waited_for(tmp_path: Path) -> None:
    stale = [OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError(errno.ENOENT, "No such file")]

    def once_more() -> str:
        if stale:
            raise stale.pop()
        return "read"

    assert patiently(tmp_path / "f", once_more, 5.0) == "read" and not stale
    threading.Timer(0.2, (tmp_path / "late").write_bytes, [b"x"]).start()
    assert patiently(tmp_path / "late", (tmp_path / "late").read_bytes, 60.0) == b"x"
    tried = []
    with pytest.raises(FileNotFoundError):
        patiently(tmp_path / "never", lambda: tried.append(1) or (tmp_path / "never").read_bytes(), 0.2)
    assert len(tried) > 1
    with pytest.raises(IsADirectoryError):  # what waiting doesn't cure
        patiently(tmp_path, tmp_path.read_bytes, 60.0)


def test_a_local_file_system_is_not_waited_for(tmp_path: Path) -> None:
    assert not lags(tmp_path) and not lags(tmp_path / "absent")
    tried = []
    with pytest.raises(FileNotFoundError):
        patiently(tmp_path / "f", lambda: tried.append(time.monotonic()) or (tmp_path / "f").read_bytes())
    assert len(tried) == 1


@pytest.mark.parametrize("number", sorted(FULL))
def test_a_quota_is_a_full_disk(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFullError, match=rf"f: {os.strerror(number)}; needed 7 bytes .* raise the quota"):
        raise_write_error(OSError(number, os.strerror(number)), tmp_path / "f", 7)

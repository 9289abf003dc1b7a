"""Copies that outlive what they were made of, and tensors that are read before they change."""

import threading

import pytest
import torch

from rlhpc.checkpoint.snapshot import SLICE_BYTES, Lent, Snapshot


def test_a_copy_stays_while_training_goes_on() -> None:
    flat = torch.arange(60, dtype=torch.float32)
    live = [flat[:7], flat[7:55].view(6, 8)[:, 2:5], torch.tensor(3.5, dtype=torch.bfloat16), torch.zeros(0, 4)]
    expected = [tensor.clone() for tensor in live]
    snapshot = Snapshot()
    copies = snapshot.take(live)
    flat.zero_()
    for copy, original in zip(copies, expected, strict=True):
        assert copy.is_contiguous() and copy.dtype == original.dtype
        assert torch.equal(copy, original)

    addresses, size = [copy.data_ptr() for copy in copies], snapshot.num_bytes
    flat.fill_(2.0)
    again = snapshot.take(live)
    assert [copy.data_ptr() for copy in again] == addresses and snapshot.num_bytes == size == 64 + 128 + 64
    assert again[1].unique().tolist() == [2.0]
    assert torch.equal(copies[1], again[1])  # the same memory
    larger = snapshot.take([*live, torch.ones(1000)])
    assert snapshot.num_bytes > size and larger[-1].sum() == 1000 and larger[0].unique().tolist() == [2.0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_tensors_are_copied_in_slices(num_threads: int) -> None:
    size = SLICE_BYTES // 4
    live = [torch.randn(2 * size + 5), torch.randn(size, 1), torch.randn(7), torch.randn(3, size // 2).T]
    snapshot = Snapshot(num_threads)
    snapshot.reserve(live)
    address = snapshot.take(live)[0].data_ptr()
    for _ in range(2):
        for tensor in live:
            tensor.mul_(-3.0)
        copies = snapshot.take(live)
        assert copies[0].data_ptr() == address
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, live, strict=True))


def test_what_is_lent_is_read_as_it_was() -> None:
    """One tensor is read before the change, one is half read, one comes after it, and one was lent twice."""
    live = [torch.full((4, 3), float(i)) for i in range(4)]
    live.append(live[3])
    snapshot = Snapshot()
    lent = Lent(snapshot, live)
    with lent.reading(live[0], True) as content:
        assert content is live[0], "nothing is copied while nothing changes"
    with lent.reading(live[3], True):
        pass
    changed = threading.Event()

    def train() -> None:
        lent.settle()
        for tensor in live:
            tensor.fill_(-1.0)
        changed.set()

    with lent.reading(live[1], False) as content:
        training = threading.Thread(target=train)
        training.start()
        assert not changed.wait(0.2), "who changes a tensor waits for the slice that is being read"
        assert content.unique().tolist() == [1.0]
    training.join()
    for tensor, value in ((live[1], 1.0), (live[2], 2.0), (live[4], 3.0)):
        with lent.reading(tensor, True) as content:
            assert content.unique().tolist() == [value] and tensor.unique().tolist() == [-1.0]
    assert snapshot.num_bytes == 5 * 64 and lent.copied_s > 0
    stranger = torch.ones(2)
    with lent.reading(stranger, True) as content:
        assert content is stranger


def test_a_reader_that_fails_keeps_nobody_waiting() -> None:
    live = [torch.zeros(3)]
    lent = Lent(Snapshot(), live)
    with pytest.raises(OSError, match="full"), lent.reading(live[0], True):
        raise OSError("full")
    lent.settle()

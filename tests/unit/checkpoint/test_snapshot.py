"""Copies that outlive what they were made of, in memory that is used again."""

import pytest
import torch

from rlhpc.checkpoint.snapshot import SLICE_BYTES, Snapshot


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

"""Flat ranges: what a rank of a distributed optimizer holds of a parameter."""

from __future__ import annotations

from math import prod

Index = tuple[int, ...]


def flat_boxes(shape: Index, start: int, stop: int) -> list[tuple[Index, Index]]:
    """The elements [start, stop) of a row-major tensor of `shape`, as boxes (start, stop), in the order of the elements
    and each consecutive itself. At most 2n - 1 for n dimensions: a part of the first row, whole rows, a part of the
    last."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop,))] if shape else [((), ())]
    row = prod(shape[1:])
    boxes: list[tuple[Index, Index]] = []
    while start < stop:
        i = start // row
        if start % row == 0 and stop - start >= row:
            end = stop - stop % row
            zeros = (0,) * (len(shape) - 1)
            boxes.append(((i, *zeros), (end // row, *shape[1:])))
        else:
            end = min(stop, (i + 1) * row)
            inner = flat_boxes(shape[1:], start - i * row, end - i * row)
            boxes += (((i, *low), (i + 1, *high)) for low, high in inner)
        start = end
    return boxes

"""Frees device memory of tensors while the rollout engine uses the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopy:
    """Moves the storages of device tensors to pinned host memory and back; every view of them stays valid.

    `kept` tensors come back as they were, `scratch` ones as zeros. On a CPU nothing moves. The host memory is kept
    between sleeps: pinning it takes longer than the copy.
    """

    def __init__(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        self._kept = _by_storage(kept)
        self._scratch = _by_storage(scratch)
        self._host: list[torch.Tensor] = []
        self._index = {whole.untyped_storage()._cdata: i for i, whole in enumerate(self._kept)}
        self._asleep = False

    def sleep(self) -> None:
        if self._asleep or not (self._kept or self._scratch):
            return
        if not self._host:
            self._host = [torch.empty(len(whole), dtype=torch.uint8, pin_memory=True) for whole in self._kept]
        for whole, host in zip(self._kept, self._host, strict=True):
            host.copy_(whole, non_blocking=True)
        torch.cuda.synchronize()
        for whole in (*self._kept, *self._scratch):
            whole.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        self._asleep = True

    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or while it sleeps its content in host memory."""
        if not (self._asleep and tensor.is_cuda):
            return tensor
        host = self._host[self._index[tensor.untyped_storage()._cdata]]
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def wake(self) -> None:
        if not self._asleep:
            return
        for whole in (*self._kept, *self._scratch):
            whole.untyped_storage().resize_(len(whole))
        for whole, host in zip(self._kept, self._host, strict=True):
            whole.copy_(host, non_blocking=True)
        for whole in self._scratch:
            whole.zero_()
        torch.cuda.synchronize()
        self._asleep = False


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One byte tensor over each distinct CUDA storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_cuda and t.numel()}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]

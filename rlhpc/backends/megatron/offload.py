"""Frees device memory of the trainer's state while the rollout engine uses the device.

What is kept travels to page-locked host memory and back on a stream of its own: out while the weights are published,
which only reads them; back part by part, each while what doesn't need it yet is computed.

Small copies don't overtake large ones: while gigabytes come over PCIe, another copy to the device waits for the last of
them, in whatever chunks they come, whatever the stream. On an H200 that held for 256 KiB, though not for a scalar;
kernels, copies within the device or to the host, and allocations went on. So whoever has batches to bring over does
that before it brings a part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from rlhpc.backends.megatron.host_memory import check_free, page_locked, ranks_here
from rlhpc.checkpoint.snapshot import aligned
from rlhpc.errors import ConfigError

# What a GPU holds while the engine generates besides the engine's share and the trainer's state: contexts, CUDA graphs,
# NCCL's buffers, what allocators keep. 4.3 to 7.9 GiB on an H200, with 5.6 B parameters.
RESERVE_BYTES = 12 * 2**30


class _Part:
    """Storages that travel together."""

    def __init__(self, device: list[torch.Tensor]) -> None:
        self.device = device  # uint8, each over a whole storage
        self.host: list[torch.Tensor] = []  # as many, of the same lengths
        self.is_here = True  # on the device, or on the way to it
        self.is_copied = False  # host memory has the content, or will have it when the copies under way are over
        self.arrived: torch.cuda.Event | None = None


class HostCopy:
    """Moves the storages of device tensors to host memory and back; every view of them stays valid.

    A storage belongs to the first of the `parts` that has a tensor in it. What is copied once isn't copied again until
    `before_change`. `scratch` tensors are freed without a copy and come back as zeros when `take_scratch` asks for
    them. What is `staying` remains on the device; so do whole storages of the parts in `filling`, as many as have room
    there: those of the last parts first, large before small. The host memory, of exactly the size that is needed, is
    taken by the first sleep and kept: page-locking takes longer than a copy.

    Callers enqueue their own work on the current stream. CPU tensors move in the same way, at once.
    """

    def __init__(
        self,
        parts: dict[str, list[torch.Tensor]],
        scratch: dict[str, list[torch.Tensor]],
        staying: Collection[str] = (),
        filling: Collection[str] = (),
        room: int = 0,
    ) -> None:
        """`room` is in bytes."""
        taken: set[int] = set()
        storages = {name: list(_storages(tensors, taken)) for name, tensors in (parts | scratch).items()}
        self.staying = {name: sum(map(len, storages[name])) for name in staying}  # bytes
        storages |= {name: [] for name in staying}
        for name in reversed([name for name in parts if name in filling]):
            kept, storages[name] = _fitting(storages[name], room - sum(self.staying.values()))
            self.staying[name] = sum(map(len, kept))
        self._parts = {name: _Part(storages[name]) for name in parts}
        self._scratch = [whole for name in scratch for whole in storages[name]]
        self._place = {
            whole.untyped_storage()._cdata: (part, index)
            for part in self._parts.values()
            for index, whole in enumerate(part.device)
        }
        self._left: torch.cuda.Event | None = None  # when the last copies out are over
        self._state = "awake"  # or "leaving", while copies out are under way, or "asleep"
        self._has_scratch = True
        on_cuda = any(whole.is_cuda for part in self._parts.values() for whole in part.device)
        self._stream = torch.cuda.Stream() if on_cuda else None

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(aligned(len(whole)) for part in self._parts.values() for whole in part.device)

    def begin_sleep(self) -> None:
        """Frees scratch and sets off the copies to host memory. Until they are over nothing may change what they copy;
        reading is free. Raises ConfigError where there is no such host memory."""
        if self._state != "awake":
            return
        self._free_scratch()  # first, since giving memory back to the device waits for everything under way
        self._take_host_memory()
        self._follow_current()
        with self._on_stream():
            for part in self._parts.values():
                if not part.is_copied:
                    _copy_each(part.host, part.device)
                    part.is_copied = True
            self._left = self._stream.record_event() if self._stream else None
        self._state = "leaving"

    def sleep(self) -> None:
        """Waits for the copies, which it sets off unless `begin_sleep` has, and frees the device memory."""
        self.begin_sleep()
        if self._state == "asleep":
            return
        if self._stream:
            self._stream.synchronize()  # copies out, and those in of a trainer that goes to sleep again at once
        for part in self._parts.values():
            part.is_here = False
            for whole in part.device:
                whole.untyped_storage().resize_(0)
        self._give_back()
        self._state = "asleep"

    def wake(self) -> None:
        """Lets parts come back, each when it is asked for. After a `begin_sleep` alone everything is still there."""
        if self._state == "leaving" and self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)  # what changes tensors comes after their copies
        self._state = "awake"

    def bring(self, name: str) -> None:
        """Takes a part's device memory and sets off its copies from host memory, unless it is there or on its way."""
        assert self._state != "asleep", f"{name} is needed while asleep; wake comes first"
        part = self._parts[name]
        if part.is_here:
            return
        for whole in part.device:
            whole.untyped_storage().resize_(len(whole))
        self._follow_current()  # the memory may be what its work has just used
        with self._on_stream():
            _copy_each(part.device, part.host)
            part.arrived = self._stream.record_event() if self._stream else None
        part.is_here = True

    def wait_for(self, name: str) -> None:
        """What is enqueued from here on finds the part on the device. The host doesn't wait."""
        self.bring(name)
        arrived = self._parts[name].arrived
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)

    def before_change(self, *names: str) -> None:
        """What is enqueued from here on may change the parts: their copies in host memory are outdated with it."""
        assert self._state == "awake", f"{names} would change while {self._state}; wake comes first"
        for name in names:
            self.wait_for(name)
            self._parts[name].is_copied = False

    def take_scratch(self) -> None:
        """Brings scratch back, as zeros, where it was freed."""
        if self._has_scratch:
            return
        for whole in self._scratch:
            whole.untyped_storage().resize_(len(whole))
            whole.zero_()
        self._has_scratch = True

    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's content where it is now: in host memory, as long as the copy there is up to date (it is valid
        until the first sleep after a change), else on the device."""
        part, index = self._place.get(tensor.untyped_storage()._cdata, (None, 0))
        if part is None or not part.is_copied:
            return tensor
        if self._left is not None:
            self._left.synchronize()
        host = part.host[index].view(tensor.dtype)
        return host.as_strided(tensor.size(), tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def _free_scratch(self) -> None:
        for whole in self._scratch:
            whole.untyped_storage().resize_(0)
        if self._scratch:
            self._give_back()
        self._has_scratch = not self._scratch

    def _take_host_memory(self) -> None:
        parts = [part for part in self._parts.values() if part.device]
        if not parts or parts[0].host:
            return
        memory = page_locked(self.num_bytes, lock=self._stream is not None)
        begin = 0
        for part in parts:
            for whole in part.device:
                part.host.append(memory[begin : begin + len(whole)])
                begin += aligned(len(whole))

    def _give_back(self) -> None:
        """To the device, where the engine takes memory from, and not from torch's allocator."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _follow_current(self) -> None:
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()


def check_room(host: HostCopy, engine_share: float) -> None:
    """Raises ConfigError where the host's memory is too small for what goes there, for all ranks of this node, or the
    device for what stays besides the engine, which may fill `engine_share` of it."""
    check_free(host.num_bytes, ranks_here())
    check_staying(host.staying, engine_share, torch.cuda.mem_get_info()[1])


def check_staying(staying: Mapping[str, int], engine_share: float, total: int) -> None:
    """Raises ConfigError where a device of `total` bytes has no room for these beside the engine's share of it."""
    needed = sum(staying.values())
    if needed <= (1 - engine_share) * total:
        return
    kept = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in staying.items() if size)
    most = math.floor(100 * (1 - needed / total)) / 100
    raise ConfigError(
        f"actor_rollout_ref.rollout.gpu_memory_utilization={engine_share:g} leaves "
        f"{(1 - engine_share) * total / 2**30:.1f} GiB of the GPU's {total / 2**30:.1f} for what stays there while "
        f"the engine generates: {kept}; set {f'at most {most:.2f}, or ' if most > 0 else ''}more of "
        "actor_rollout_ref.actor.megatron.{param,optimizer,grad}_offload=true"
    )


def _storages(tensors: Iterable[torch.Tensor], taken: set[int]) -> Iterator[torch.Tensor]:
    """A byte tensor over each storage that isn't taken yet."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in taken:
            taken.add(storage._cdata)
            yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _fitting(storages: list[torch.Tensor], room: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those that fit in so many bytes, the largest first, and the others."""
    kept: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for whole in sorted(storages, key=len, reverse=True):
        fits = len(whole) <= room
        (kept if fits else others).append(whole)
        room -= len(whole) * fits
    return kept, others


def _copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)

"""What is where while a trainer's state leaves and comes back. The storages are a CPU's, so every copy is over when it
returns; what overlaps on a GPU is in tests/distributed/test_megatron_gpu.py."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from rlhpc.backends.megatron.host_memory import check_free, page_locked
from rlhpc.backends.megatron.offload import HostCopy, check_staying
from rlhpc.errors import ConfigError


class State:
    """Weights in one buffer with views, a reference, an optimizer's state, gradients."""

    def __init__(self, *staying: str, filling: Collection[str] = (), room: int = 0) -> None:
        self.buffer = torch.arange(6.0)
        self.weight, self.bias = self.buffer[:4].view(2, 2), self.buffer[4:]
        self.reference = torch.tensor([7.0, 8.0])
        self.moment, self.alias = torch.tensor([1.0, 2.0, 3.0]), self.buffer[2:5]  # a float32 master is the weight
        self.gradient = torch.full((6,), 9.0)
        self.host = HostCopy(
            {"weights": [self.buffer], "reference": [self.reference], "optimizer": [self.alias, self.moment]},
            scratch={"gradients": [self.gradient]},
            staying=staying,
            filling=filling,
            room=room,
        )

    def wake(self) -> None:
        self.host.wake()
        for part in ("weights", "reference", "optimizer"):
            self.host.wait_for(part)

    def on_device(self) -> dict[str, bool]:
        tensors = {"weights": self.weight, "reference": self.reference, "optimizer": self.moment}
        tensors["gradient"] = self.gradient
        return {name: tensor.untyped_storage().nbytes() > 0 for name, tensor in tensors.items()}


ALL_THERE = dict.fromkeys(("weights", "reference", "optimizer", "gradient"), True)
GRADIENT_GONE = ALL_THERE | {"gradient": False}


def test_every_view_comes_back_and_gradients_as_zeros() -> None:
    state = State()
    assert state.host.num_bytes == 3 * 64  # one storage each; a master that is the weight is no second one
    state.host.begin_sleep()
    assert state.on_device() == GRADIENT_GONE and state.weight.tolist() == [[0, 1], [2, 3]]  # readable meanwhile
    state.host.sleep()
    state.host.sleep()
    assert not any(state.on_device().values())
    state.host.wake()
    state.host.wait_for("weights")  # the others come when they are asked for
    assert state.on_device() == {"weights": True, "reference": False, "optimizer": False, "gradient": False}
    state.host.sleep()
    assert not any(state.on_device().values())
    state.wake()
    state.wake()
    assert state.on_device() == GRADIENT_GONE
    assert state.weight.tolist() == [[0, 1], [2, 3]] and state.bias.tolist() == [4, 5] == state.buffer[4:].tolist()
    assert state.alias.tolist() == [2, 3, 4] and state.moment.tolist() == [1, 2, 3]
    assert state.reference.tolist() == [7, 8]
    state.host.take_scratch()
    assert state.on_device() == ALL_THERE and state.gradient.tolist() == [0] * 6
    state.gradient.fill_(5)
    state.host.take_scratch()
    assert state.gradient.tolist() == [5] * 6  # there already


def test_what_did_not_change_is_not_copied_again() -> None:
    state = State()
    state.host.sleep()
    state.wake()
    state.moment.fill_(-1)  # untold, so that it shows which content comes back
    state.host.sleep()
    state.wake()
    assert state.moment.tolist() == [1, 2, 3]
    state.host.before_change("optimizer")
    state.moment.fill_(-2)
    state.buffer.fill_(-2)
    state.host.sleep()
    state.wake()
    assert state.moment.tolist() == [-2] * 3 and state.buffer.tolist() == [0, 1, 2, 3, 4, 5]


def test_content_is_found_in_every_state() -> None:
    """A save asks at any time; what it is given on the host stays until the first sleep after a change."""
    state = State()
    for part in (state.weight, state.alias, state.moment):
        assert state.host.resident(part) is part
    state.host.begin_sleep()
    lent = [state.host.resident(part) for part in (state.weight.t(), state.alias[1:], state.moment)]
    for move in (state.host.sleep, state.wake, lambda: state.host.before_change("weights", "optimizer")):
        move()
        assert [part.tolist() for part in lent] == [[[0, 2], [1, 3]], [3, 4], [1, 2, 3]]
        assert all(part.untyped_storage().data_ptr() != state.buffer.data_ptr() for part in lent)
    assert state.host.resident(state.moment) is state.moment
    state.moment.fill_(4)
    assert lent[2].tolist() == [1, 2, 3]
    state.host.sleep()
    assert lent[2].tolist() == [4, 4, 4] == state.host.resident(state.moment).tolist()


def test_waking_before_asleep_leaves_everything() -> None:
    state = State()
    state.host.begin_sleep()
    state.wake()
    assert state.on_device() == GRADIENT_GONE and state.moment.tolist() == [1, 2, 3]
    state.host.before_change("optimizer")
    state.moment.fill_(6)
    state.host.sleep()
    state.wake()
    assert state.moment.tolist() == [6, 6, 6]


def test_parts_that_stay() -> None:
    """A float32 master is the weight, and stays with it."""
    state = State("weights", "reference")
    state.host.sleep()
    assert state.on_device() == {"weights": True, "reference": True, "optimizer": False, "gradient": False}
    assert state.host.resident(state.alias) is state.alias and state.host.resident(state.moment).tolist() == [1, 2, 3]
    state.wake()
    state.host.before_change("weights", "optimizer")
    assert state.host.num_bytes == 64 and state.moment.tolist() == [1, 2, 3]


def test_what_has_room_stays() -> None:
    """Bytes: weights 24, reference 8, moment 12, gradients 24, of which the reference stays anyway."""
    everything = ("weights", "optimizer")
    for room, kept in ((19, set()), (20, {"optimizer"}), (43, {"optimizer"}), (44, {"optimizer", "weights"})):
        state = State("reference", filling=everything, room=room)
        state.host.sleep()
        here = state.on_device()
        assert {name for name in everything if here[name]} == kept and here["reference"] and not here["gradient"]
        assert state.host.num_bytes == 64 * (2 - len(kept))
        sizes = {"reference": 8, "optimizer": 12, "weights": 24}
        assert state.host.staying == {name: sizes[name] * (name in kept | {"reference"}) for name in sizes}
        state.wake()
        state.host.before_change(*everything)
        assert state.moment.tolist() == [1, 2, 3] and state.weight.tolist() == [[0, 1], [2, 3]]
    three = [torch.zeros(size) for size in (2, 5, 3)]
    host = HostCopy({"optimizer": three}, {}, filling=["optimizer"], room=7 * 4)
    host.sleep()
    assert [bool(tensor.untyped_storage().nbytes()) for tensor in three] == [True, True, False]


def test_use_while_asleep_is_an_error() -> None:
    state = State()
    state.host.sleep()
    with pytest.raises(AssertionError, match="weights is needed while asleep"):
        state.host.wait_for("weights")
    with pytest.raises(AssertionError, match="would change while asleep"):
        state.host.before_change("weights")


def test_more_host_memory_than_there_is() -> None:
    check_free(2**20, num_ranks=8)
    with pytest.raises(ConfigError, match=r"8 ranks here want 4096.00 GiB each, \d+\.\d\d GiB free; give the job more"):
        check_free(2**42, num_ranks=8)
    with pytest.raises(ConfigError, match=r"4096.00 GiB wanted, .* set optimizer_offload=false or param_offload=false"):
        page_locked(2**42)


def test_what_stays_must_fit_beside_the_engine() -> None:
    """Of 100 GiB; what is told to set is accepted, so it is rounded down."""
    staying, total = {"weights": 0, "optimizer": int(44.4 * 2**30)}, 100 * 2**30
    check_staying(staying, 0.55, total)
    with pytest.raises(
        ConfigError, match=r"=0.56 leaves 44.0 GiB of the GPU's 100.0 .*: optimizer 44.4 GiB; set at most"
    ):
        check_staying(staying, 0.56, total)
    with pytest.raises(ConfigError, match=r"set at most 0.55, or more of"):
        check_staying(staying, 0.9, total)
    with pytest.raises(ConfigError, match=r"optimizer 222.0 GiB; set more of .*optimizer,grad}_offload=true"):
        check_staying({"optimizer": 222 * 2**30}, 0.1, total)


def test_host_memory_is_of_the_size_that_is_asked_for() -> None:
    memory = page_locked(3 * 2**20 + 1, lock=False)
    assert len(memory) == 3 * 2**20 + 1 and not memory.any()

"""What the rank does in the sleep tests of test_megatron_gpu.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhpc.errors import ConfigError
from tests.distributed import megatron_ranks
from tests.distributed.checkpoint_ranks import save, train
from tests.distributed.megatron_ranks import make_trainer


def in_turn(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several of the functions below in one start of the rank."""
    return megatron_ranks.in_turn(calls, globals())


def equal(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[key].cpu(), wanted[key].cpu()) for key in wanted)


def copied(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {key: tensor.cpu().clone() for key, tensor in tensors.items()}


def sleep_and_train(
    model_dir: Path, dtype: str, checkpoints: Path, device: str = "cuda", adv_estimator: str = "grpo"
) -> dict[str, Any]:
    """What each part of a sleep frees, whether everything comes back and is found meanwhile, and three steps after it
    against the same steps of the same state without a sleep."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = make_trainer(
        model_dir, {}, device=device, adv_estimator=adv_estimator, model__dtype=dtype, actor__use_kl_loss=True
    )
    list(train(trainer, range(1)))
    weights, state = copied(trainer.source_buffers()), copied(dict(trainer.state_pieces().pieces))
    right: dict[str, bool] = {}
    allocated = [torch.cuda.memory_allocated() if device == "cuda" else 0]

    trainer.begin_sleep()
    allocated.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    right["read while leaving"] = equal(trainer.source_buffers(), weights)
    for _ in range(2):
        trainer.sleep()
    allocated.append(torch.cuda.memory_allocated() if device == "cuda" else 0)
    pieces = dict(trainer.state_pieces().pieces)
    right["found asleep"] = equal(pieces, state) and all(piece.is_cpu for piece in pieces.values())
    save(trainer, checkpoints)

    trainer.wake()
    right["found arriving"] = equal(dict(trainer.state_pieces().pieces), state)
    trainer.sleep()  # at once, and without a change
    trainer.wake()
    trainer.wake()
    right["weights are there at once"] = equal(trainer.source_buffers(), weights)
    first = list(train(trainer, range(1, 2)))
    trainer.sleep()  # after a change
    trainer.wake()
    metrics = first + list(train(trainer, range(2, 4)))
    after = copied(dict(trainer.state_pieces().pieces))

    trainer.sleep()
    trainer.load_checkpoint(checkpoints / "step-000001")
    right["loaded"] = equal(dict(trainer.state_pieces().pieces), state) and equal(trainer.source_buffers(), weights)
    without = list(train(trainer, range(1, 4)))
    right["same steps"] = without == metrics and equal(dict(trainer.state_pieces().pieces), after)
    return {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "critic_parameters": sum(weight.numel() for weight in trainer.critic.buffers().values())
        if trainer.critic
        else 0,
        "allocated": allocated,
        "right": right,
        "metrics": metrics,
    }


def stay_awake(model_dir: Path, checkpoints: Path, device: str = "cuda") -> dict[str, Any]:
    """With nothing but gradients offloaded: what a sleep frees, whether the state is saved from where it is, and what
    is said where an engine leaves no room for it."""
    from rlhpc.backends.megatron.offload import check_room

    staying = {f"actor__megatron__{name}_offload": False for name in ("param", "optimizer")}
    trainer = make_trainer(model_dir, {}, device=device, model__dtype="bfloat16", **staying)
    list(train(trainer, range(1)))
    state, before = (
        copied(dict(trainer.state_pieces().pieces)),
        torch.cuda.memory_allocated() if device == "cuda" else 0,
    )
    trainer.sleep()
    after = torch.cuda.memory_allocated() if device == "cuda" else 0
    pieces = dict(trainer.state_pieces().pieces)
    right = equal(pieces, state) and all(piece.device.type == device for piece in pieces.values())
    save(trainer, checkpoints)
    trainer.wake()
    list(train(trainer, range(1, 2)))
    trainer.load_checkpoint(checkpoints / "step-000001")
    right = right and equal(dict(trainer.state_pieces().pieces), state)
    parameters = sum(weight.numel() for weight in trainer.source_buffers().values())
    try:
        check_room(trainer._host, engine_share=1.0)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    return {"parameters": parameters, "freed": before - after, "right": right, "refused": refused}


def overlap(num_bytes: int) -> dict[str, bool]:
    """Two parts: a few weights, and an optimizer's state whose copy takes long enough to be seen under way."""
    from rlhpc.backends.megatron.offload import HostCopy

    weights = torch.arange(1000.0, device="cuda")
    state = torch.arange(num_bytes // 4, dtype=torch.int32, device="cuda")
    host = HostCopy({"weights": [weights], "optimizer": [state]}, {})
    wanted, right = state.clone(), {}
    host.sleep()  # takes the host memory
    host.wake()
    host.before_change("optimizer")
    state.neg_()
    host.begin_sleep()
    right["leaves behind the caller's back"] = not host._stream.query()
    host.wake()  # another change, while copies are under way, has to wait for them
    host.before_change("optimizer")
    state.zero_()
    torch.cuda.synchronize()
    right["what left was whole"] = torch.equal(host._parts["optimizer"].host[0].view(torch.int32), -wanted.cpu())
    host.sleep()
    host._parts["optimizer"].host[0].view(torch.int32).copy_(wanted)  # what comes can be told from what was there
    host.wake()
    host.wait_for("weights")
    host.bring("optimizer")
    doubled = (weights * torch.tensor(2.0, device="cuda")).cpu()
    right["work goes on meanwhile"] = torch.equal(doubled, 2 * torch.arange(1000.0)) and not host._stream.query()
    host.before_change("optimizer")
    right["optimizer is waited for"] = torch.equal(state, wanted)
    state.neg_()
    host.begin_sleep()
    host.wake()
    right["found whole while still leaving"] = torch.equal(host.resident(state), -wanted.cpu())
    return right

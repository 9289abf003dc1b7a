"""Functions that run on each rank of the Megatron trainer's tests."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhpc.config.schema import RunConfig
from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from rlhpc.data.types import PackedBatch
from rlhpc.train.protocols import LossSpec

VOCAB = 319
TEMPERATURE = 0.7
KL_COEF, ENTROPY_COEFF = 0.3, 0.05
MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def sequences(num: int, seed: int) -> list[TokenSequence]:
    """Random prompts and responses of 1 to 9 tokens with fields that make every term of the loss count. The first
    prompt has one token, the second response too."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num):
        prompt, response = (1 if i == 0 else int(rng.integers(1, 10))), (1 if i == 1 else int(rng.integers(1, 10)))
        made.append(
            TokenSequence(
                i,
                rng.integers(5, VOCAB, prompt + response).astype(np.int32),
                prompt,
                {
                    "advantages": np.full(response, rng.standard_normal(), np.float32),
                    "rollout_weights": rng.uniform(0.5, 1.5, response).astype(np.float32),
                    "behaviour_shift": rng.normal(0, 0.5, response).astype(np.float32),
                    "ref_shift": rng.normal(0, 0.3, response).astype(np.float32),
                },
            )
        )
    return made


def loss_spec(batch: list[TokenSequence]) -> LossSpec:
    return LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.3, clip_c=1.5, loss_agg_mode="token-mean",
        num_global_tokens=float(sum(s.response_len for s in batch)), num_global_seqs=float(len(batch)),
        loss_scale_factor=None, entropy_coeff=ENTROPY_COEFF, kl_coef=KL_COEF, kl_type="k3", temperature=TEMPERATURE,
    )  # fmt: skip


def make_trainer(model_dir: Path, sizes: Mapping[str, int], device: str = "cpu", **settings: Any) -> Any:
    """`settings` are dotted paths below actor_rollout_ref, dots written as two underscores."""
    from rlhpc.backends.megatron.trainer import MegatronTrainer

    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cfg = RunConfig()
    cfg.actor_rollout_ref.model.dtype = "float32"
    cfg.actor_rollout_ref.actor.optim.lr = 1e-2
    for axis, size in sizes.items():
        setattr(cfg.actor_rollout_ref.actor.megatron, MEGATRON_SIZES[axis], size)
    for path, value in settings.items():
        *parents, leaf = path.split("__")
        node: Any = cfg.actor_rollout_ref
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, leaf, value)
    hf_config = json.loads((model_dir / "config.json").read_text())
    return MegatronTrainer(cfg, hf_config, model_dir, device)


def filled_batches(trainer: Any, batch: list[TokenSequence], max_tokens: int) -> list[PackedBatch]:
    """This rank's microbatches with behaviour and reference logprobs at fixed distances from the policy's own."""
    batches = pack(batch, dp_size=trainer.data_parallel_size, max_tokens=max_tokens)[trainer.data_parallel_rank]
    values = trainer.logprobs(batches, temperature=TEMPERATURE, model="policy")
    filled = []
    for packed, logprobs in zip(batches, values, strict=True):
        fields = dict(packed.token_fields)
        shift, ref_shift = fields.pop("behaviour_shift"), fields.pop("ref_shift")
        fields |= {"trainer_logprobs": logprobs.cpu() + shift, "ref_logprobs": logprobs.cpu() + ref_shift}
        filled.append(replace(packed, token_fields=fields))
    return filled


def one_step(model_dir: Path, sizes: Mapping[str, int], max_tokens: int, **settings: Any) -> dict[str, Any]:
    """Logprobs by sequence, metrics, this rank's parts of all gradients and the specs to place them with."""
    trainer = make_trainer(model_dir, sizes, actor__optim__clip_grad=0.0, **settings)
    batch = sequences(12, seed=3)
    batches = filled_batches(trainer, batch, max_tokens)
    values = trainer.logprobs(batches, temperature=TEMPERATURE, model="policy")
    metrics = trainer.step(batches, loss_spec(batch))
    logprobs: dict[int, np.ndarray] = {}
    for packed, value in zip(batches, values, strict=True):
        logprobs |= {i: row.cpu().numpy() for i, row in split_by_sequence(value, packed).items()}
    shards = {s.name: (s.start, s.stop, s.master.grad.cpu().numpy().copy()) for s in trainer._optimizer.shards()}
    return {
        "num_microbatches": len(batches),
        "dp_rank": trainer.data_parallel_rank,
        "logprobs": logprobs,
        "metrics": metrics,
        "gradient_shards": shards,
        "shapes": {name: tuple(value.shape) for name, value in trainer.source_buffers().items()},
        "specs": trainer.source_specs(),
        "layout": trainer._layout,
    }


def train(trainer: Any, steps: range) -> Iterator[dict[str, float]]:
    for step in steps:
        batch = sequences(8, seed=100 + step)
        yield trainer.step(filled_batches(trainer, batch, max_tokens=60), loss_spec(batch))


def train_save_train(model_dir: Path, state_dir: Path, sizes: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """Three steps, a saved state, two more steps."""
    trainer = make_trainer(model_dir, sizes, **settings)
    list(train(trainer, range(3)))
    torch.rand(5), np.random.rand(5), random.random()  # the streams stand elsewhere than in a new process
    tensors, scalars = trainer.state_tensors()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, _file(state_dir, "safetensors"))
    Path(_file(state_dir, "json")).write_text(json.dumps(scalars))
    return _outcome(trainer, list(train(trainer, range(3, 5))))


def load_train(model_dir: Path, state_dir: Path, sizes: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """The last two of those steps in a new process."""
    trainer = make_trainer(model_dir, sizes, **settings)
    scalars = json.loads(Path(_file(state_dir, "json")).read_text())
    trainer.load_state(load_file(_file(state_dir, "safetensors")), scalars)
    return _outcome(trainer, list(train(trainer, range(3, 5))))


def _file(directory: Path, suffix: str) -> str:
    return str(directory / f"rank-{os.environ['RANK']}.{suffix}")


def _outcome(trainer: Any, metrics: list[dict[str, float]]) -> dict[str, Any]:
    weights = {name: value.view(torch.uint8).cpu().numpy().copy() for name, value in trainer.source_buffers().items()}
    draws = [torch.rand(3).tolist(), float(np.random.rand()), random.random()]
    return {"metrics": metrics, "weights": weights, "random": draws}


def survive_nan(model_dir: Path) -> dict[str, Any]:
    """A step whose advantages are NaN on rank 1 alone, between two good ones."""
    from rlhpc.errors import TrainingError

    trainer = make_trainer(model_dir, {"ep": 2})
    list(train(trainer, range(1)))
    before, _ = trainer.state_tensors()
    before = {name: tensor.clone() for name, tensor in before.items()}
    batch = sequences(8, seed=7)
    batches = filled_batches(trainer, batch, max_tokens=60)
    if dist.get_rank() == 1:
        bad = batches[0].token_fields["advantages"] * float("nan")
        batches[0] = replace(batches[0], token_fields={**batches[0].token_fields, "advantages": bad})
    try:
        trainer.step(batches, loss_spec(batch))
        message = None
    except TrainingError as error:
        message = str(error)
    after, _ = trainer.state_tensors()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"message": message, "changed": changed, **_outcome(trainer, list(train(trainer, range(1, 2))))}


def reference_stays(model_dir: Path) -> dict[str, Any]:
    trainer = make_trainer(model_dir, {}, actor__use_kl_loss=True, actor__megatron__freeze_moe_router=True)
    batches = pack(sequences(6, seed=1), dp_size=1, max_tokens=60)[0]

    def reference() -> list[torch.Tensor]:
        return trainer.logprobs(batches, temperature=1.0, model="reference")

    initial, policy = reference(), trainer.logprobs(batches, temperature=1.0, model="policy")
    routers = {n: v.clone() for n, v in trainer.source_buffers().items() if "router" in n}
    list(train(trainer, range(2)))
    moved = trainer.logprobs(batches, temperature=1.0, model="policy")
    return {
        "same_at_start": all(map(torch.equal, initial, policy)),
        "reference_same": all(map(torch.equal, initial, reference())),
        "policy_moved": max(float((a - b).abs().max()) for a, b in zip(policy, moved, strict=True)),
        "routers_same": all(torch.equal(v, trainer.source_buffers()[n]) for n, v in routers.items()),
        "state_has_routers": any(n.startswith("frozen/") for n in trainer.state_tensors()[0]),
    }


def learning_rates(model_dir: Path, steps: int, **settings: Any) -> list[float]:
    trainer = make_trainer(model_dir, {}, **settings)
    return [metrics["actor/lr"] for metrics in train(trainer, range(steps))]


def export(model_dir: Path, output_dir: Path, sizes: Mapping[str, int]) -> None:
    make_trainer(model_dir, sizes).save_hf(output_dir)


def sleep_and_train(model_dir: Path, dtype: str) -> dict[str, Any]:
    """On CUDA: what a sleep frees, whether weights come back, and two steps with and without one in between."""
    trainer = make_trainer(model_dir, {}, device="cuda", model__dtype=dtype, actor__use_kl_loss=True)
    list(train(trainer, range(1)))
    weights = {name: value.clone() for name, value in trainer.source_buffers().items()}
    state = {name: value.cpu().clone() for name, value in trainer.state_tensors()[0].items()}
    torch.cuda.synchronize()
    awake = torch.cuda.memory_allocated()
    trainer.sleep()
    trainer.sleep()
    asleep = torch.cuda.memory_allocated()
    asleep_state, _ = trainer.state_tensors()
    same = all(torch.equal(value.cpu(), state[name]) for name, value in asleep_state.items())
    trainer.wake()
    same = same and all(torch.equal(value, weights[name]) for name, value in trainer.source_buffers().items())
    parameters = sum(value.numel() for value in weights.values())
    metrics = list(train(trainer, range(1, 3)))
    return {"freed": awake - asleep, "parameters": parameters, "same": same, "metrics": metrics}

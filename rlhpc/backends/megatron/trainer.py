"""The trainer on megatron-core: one rank of it, for every parallel layout but context parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlhpc.backends.megatron import cpu_shim
from rlhpc.backends.megatron.attention_backend import Heads, attention_backend
from rlhpc.backends.megatron.experts import balance_loss, expert_balance, start_balance_loss
from rlhpc.backends.megatron.in_place import keep_in_place, place_experts
from rlhpc.backends.megatron.loss import microbatch_loss
from rlhpc.backends.megatron.model import PolicyModel, transformer_config
from rlhpc.backends.megatron.offload import RESERVE_BYTES, HostCopy, check_room
from rlhpc.backends.megatron.optimizer import Optimizer
from rlhpc.backends.megatron.state import TrainingState, told_to_all
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.data.types import PackedBatch
from rlhpc.errors import ConfigError, TrainingError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for
from rlhpc.reshard.hf import load_hf, save_hf
from rlhpc.train.protocols import LossSpec, TrainerState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronTrainer:
    """Implements train.protocols.Trainer. torch.distributed must be initialised, its world being the trainer's.

    `shared` are tensors that the policy's experts are to be, by parameter names: their memory is the engine's. In
    bfloat16, with experts that no other rank has.
    Raises ConfigError for what the model or this trainer can't do, ModelError for an unusable model directory.
    """

    def __init__(
        self,
        cfg: RunConfig,
        hf_config: dict[str, Any],
        model_dir: Path,
        device: str,
        shared: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        cpu_shim.install()
        self._cfg, self._model_dir, self._device = cfg, Path(model_dir), _device(device)
        self._layout = _layout(cfg, dist.get_world_size())
        family = family_for(hf_config)
        self._facts = family.model_facts(hf_config)
        model_cfg = cfg.actor_rollout_ref.model
        if model_cfg.dtype not in DTYPES:
            raise ConfigError(
                f"actor_rollout_ref.model.dtype={model_cfg.dtype!r} is unknown; choose {', '.join(DTYPES)}"
            )
        self._attention = attention_backend(
            cfg.actor_rollout_ref.actor.megatron.attention_backend,
            self._device,
            DTYPES[model_cfg.dtype],
            Heads.of(self._facts.num_heads, self._facts.num_kv_heads, self._facts.head_dim, self._layout.tp),
        )
        self._balance_coeff = cfg.actor_rollout_ref.actor.megatron.moe_aux_loss_coeff
        if self._balance_coeff and not self._facts.num_experts:
            raise ConfigError(
                f"actor_rollout_ref.actor.megatron.moe_aux_loss_coeff={self._balance_coeff} balances experts, which a "
                f"{self._facts.model_type} model hasn't; set 0"
            )
        self._specs = family.trainer_specs(hf_config, self._layout, model_cfg.dtype)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._layout.tp,
            pipeline_model_parallel_size=self._layout.pp,
            expert_model_parallel_size=self._layout.ep,
            expert_tensor_parallel_size=self._layout.etp,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(cfg.seed)

        policy = self._build_model(shared)
        if cfg.actor_rollout_ref.actor.megatron.freeze_moe_router:
            for name, parameter in policy.named_parameters():
                parameter.requires_grad_(not name.endswith("mlp.router.weight"))
        self._policy = DistributedDataParallel(
            policy.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=cfg.actor_rollout_ref.actor.megatron.overlap_grad_reduce,
            ),
            policy,
        )
        if shared:
            keep_in_place(self._policy, shared)
        if self._policy.ddp_config.overlap_grad_reduce:
            policy.config.no_sync_func = self._policy.no_sync  # only the last microbatch's gradients are whole
        policy.config.finalize_model_grads_func = _sum_gradients
        self._optimizer = Optimizer(self._policy, cfg.actor_rollout_ref.actor.optim, _optimizer_steps(cfg))
        needs_reference = cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
        self._reference = self._build_model().requires_grad_(False).eval() if needs_reference else None
        self._state = TrainingState(dict(policy.named_parameters()), self._optimizer, self._specs, dist.get_rank())
        self._host = self._host_copy()
        if self._device.type == "cuda":
            with told_to_all():
                check_room(self._host, cfg.actor_rollout_ref.rollout.gpu_memory_utilization)

    def _build_model(self, shared: Mapping[str, torch.Tensor] | None = None) -> PolicyModel:
        model_cfg = self._cfg.actor_rollout_ref.model
        config = transformer_config(
            self._facts,
            self._layout,
            DTYPES[model_cfg.dtype],
            attention=self._attention,
            recompute=model_cfg.enable_gradient_checkpointing,
            recompute_modules=self._cfg.actor_rollout_ref.actor.megatron.recompute_modules,
            balance_coeff=self._balance_coeff,
        )
        model = PolicyModel(config, self._facts)
        if shared:
            place_experts(model, shared)
        for parameter in model.parameters():
            parameter.data.zero_()  # padded vocabulary rows belong to no tensor of the file
        model.to(self._device)
        with told_to_all():
            load_hf(self._model_dir, self._specs, dist.get_rank(), _buffers(model))
        return model

    # --- layout and weights

    @property
    def data_parallel_rank(self) -> int:
        return self._layout.coords(dist.get_rank()).dp

    @property
    def data_parallel_size(self) -> int:
        return self._layout.dp

    def source_specs(self) -> Sequence[ShardSpec]:
        return self._specs

    def source_buffers(self) -> Mapping[str, torch.Tensor]:
        return _buffers(self._policy.module)

    def save_hf(self, directory: Path) -> None:
        save_hf(directory, self._specs, dist.get_rank(), dist.group.WORLD, self.source_buffers(), self._model_dir)

    # --- forward and backward

    def logprobs(self, batches: Sequence[PackedBatch], *, temperature: float, model: str) -> list[torch.Tensor]:
        """See Trainer. `temperature` divides the logits; it must be positive."""
        if model == "reference" and self._reference is None:
            raise ConfigError(
                "reference logprobs need the reference model; set actor_rollout_ref.actor.use_kl_loss or "
                "algorithm.use_kl_in_reward"
            )
        module = self._policy.module if model == "policy" else self._reference
        assert module is not None
        batches = self._on_device(batches)
        self._host.wait_for("weights" if model == "policy" else "reference")
        self._host.bring("reference")  # during the policy's logprobs

        def collect(hidden: torch.Tensor, batch: PackedBatch, packed: Any, non_loss_data: bool) -> torch.Tensor:
            return module.logprobs(hidden, batch, packed, temperature)[0]

        module.eval()
        with torch.no_grad():
            values = self._schedule(module, batches, collect, forward_only=True)
        return [self._from_last_stage(batch.loss_mask, value) for batch, value in _zip(batches, values)]

    def step(self, batches: Sequence[PackedBatch], loss: LossSpec) -> dict[str, float]:
        """See Trainer. Raises TrainingError on all ranks, with nothing changed, for a non-finite loss or gradient."""
        module = self._policy.module
        batches = self._on_device(batches)
        self._host.bring("optimizer")  # during forward and backward
        no_tokens = torch.zeros((), dtype=torch.int, device=self._device)

        def calculate(hidden: torch.Tensor, batch: PackedBatch, packed: Any) -> tuple[Any, ...]:
            logprobs, entropies = module.logprobs(hidden, batch, packed, loss.temperature)
            value, metrics = microbatch_loss(logprobs, entropies, batch, loss)
            return value, no_tokens, metrics | {"actor/loss": value.detach()}

        self._host.take_scratch()
        module.train()
        if self._balance_coeff:
            start_balance_loss(module.decoder.layers, self._num_step_tokens(batches))
        self._optimizer.zero_grad()
        parts = self._schedule(self._policy, batches, calculate, forward_only=False)
        metrics = self._sum_metrics(parts)
        norm = self._optimizer.gradient_norm()
        self._check_finite(metrics, norm)
        self._host.before_change("weights", "optimizer")
        rate = self._optimizer.apply(norm)
        # Everything but these two is summed over data-parallel ranks by the caller.
        balance = expert_balance(module.decoder.layers, self._facts.num_layers, self._layout, self._device)
        if self._balance_coeff:
            balance["actor/moe/aux_loss"] = balance_loss(module.decoder.layers, self._device)
        metrics |= {name: value / self._layout.dp for name, value in balance.items()}
        return metrics | {"actor/grad_norm": norm, "actor/lr": rate}

    def _schedule(
        self,
        model: torch.nn.Module,
        batches: Sequence[PackedBatch],
        finish: Callable[..., Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs all microbatches through the pipeline; what `finish` gave for each on the last stage, else nothing."""

        def forward_step(batch_iterator: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Any, Any]:
            batch = next(batch_iterator)
            packed = getattr(model, "module", model).pack(batch)
            return model(packed), partial(finish, batch=batch, packed=packed)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=max(batch.num_tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _num_step_tokens(self, batches: Sequence[PackedBatch]) -> int:
        """Over all data-parallel ranks."""
        total = torch.tensor(sum(batch.num_tokens for batch in batches), device=self._device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return int(total)

    def _on_device(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        move = partial(torch.Tensor.to, device=self._device, non_blocking=True)
        return [
            replace(
                batch,
                **{name: move(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)},
                token_fields={name: move(value) for name, value in batch.token_fields.items()},
            )
            for batch in batches
        ]

    def _sum_metrics(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        names = sorted(parts[0]) if parts else []
        rows = [torch.stack([part[name].double() for name in names]) for part in parts]
        metrics = [dict(zip(names, torch.stack(rows).sum(0).tolist() if rows else [], strict=True))]
        if self._layout.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(metrics, group=group, group_src=self._layout.pp - 1)
        return metrics[0]

    def _from_last_stage(self, like: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        if self._layout.pp == 1:
            assert value is not None
            return value
        result = torch.empty_like(like) if value is None else value.contiguous()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(result, group=group, group_src=self._layout.pp - 1)
        return result

    def _check_finite(self, metrics: dict[str, float], norm: float) -> None:
        """`norm` is the same everywhere, the loss is this rank's: all ranks must raise or none."""
        loss = metrics.pop("actor/loss")
        bad = torch.tensor(float(not (math.isfinite(loss) and math.isfinite(norm))), device=self._device)
        dist.all_reduce(bad)
        if bad.item():
            self._optimizer.zero_grad()
            raise TrainingError(
                f"non-finite loss or gradient on {int(bad.item())} of {dist.get_world_size()} ranks in optimizer step "
                f"{self._optimizer.schedule.num_steps + 1} (here loss={loss}, grad_norm={norm}); weights and optimizer "
                "are unchanged. Look at rewards and logprobs of this step; a lower actor.optim.lr often helps"
            )

    # --- memory

    def _host_copy(self) -> HostCopy:
        buffers = [*self._policy.buffers, *self._policy.expert_parallel_buffers]
        frozen = [parameter for parameter in self._policy.module.parameters() if not parameter.requires_grad]
        parts: dict[str, list[torch.Tensor]] = {  # in the order in which they are needed
            "weights": [*(buffer.param_data for buffer in buffers), *frozen],
            "reference": list(self._reference.parameters()) if self._reference else [],
            "optimizer": list(self._state.tensors()),
        }
        megatron, on_gpu = self._cfg.actor_rollout_ref.actor.megatron, self._device.type == "cuda"
        leave: dict[str, bool | str] = {"weights": megatron.param_offload, "reference": megatron.param_offload}
        leave |= {"optimizer": megatron.optimizer_offload, "gradients": megatron.grad_offload}
        gradients = [buffer.grad_data for buffer in buffers]
        staying = [name for name in leave if not (leave[name] and on_gpu)]
        filling, room = [name for name in leave if leave[name] == "auto"], 0
        if filling and on_gpu:
            engine_share = self._cfg.actor_rollout_ref.rollout.gpu_memory_utilization
            room = int((1 - engine_share) * torch.cuda.mem_get_info()[1]) - RESERVE_BYTES
        host = HostCopy(parts, {"gradients": gradients}, staying, filling, room)
        if filling and on_gpu:
            kept = sum(host.staying.values())
            told = f"{kept / 2**30:.1f} of {(kept + host.num_bytes) / 2**30:.1f} GiB of the trainer's state stay"
            print(f"{told} on the GPU while the engine generates", flush=True)
        return host

    def begin_sleep(self) -> None:
        self._host.begin_sleep()

    def sleep(self) -> None:
        self._host.sleep()

    def wake(self) -> None:
        self._host.wake()
        self._host.wait_for("weights")

    # --- state

    def state_pieces(self) -> TrainerState:
        """See Trainer. Tensors are live, valid until the next step; copies in host memory where these are as new."""
        return self._state.saved(self._host.resident)

    def load_checkpoint(self, directory: Path) -> None:
        """See Trainer. The trainer is awake afterwards."""
        self.wake()
        self._host.before_change("weights", "optimizer")
        with told_to_all():
            self._state.load(read_manifest(directory), self._layout, self._cfg.seed)
        self._optimizer.publish_masters()

    def load_weights(self, source: Path) -> None:
        """See Trainer. The trainer is awake afterwards."""
        self.wake()
        self._host.before_change("weights", "optimizer")
        with told_to_all():
            self._state.load_weights(Path(source))
        self._optimizer.publish_masters()


def _buffers(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction without its division by a token count: the loss is normalised already."""
    finalize_model_grads(model, None, **kwargs)


def _zip(batches: list[PackedBatch], values: list[torch.Tensor]) -> Iterator[tuple[PackedBatch, torch.Tensor | None]]:
    return zip(batches, values or [None] * len(batches), strict=True)


def _device(name: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if name.startswith("cuda") else torch.device(name)


def _layout(cfg: RunConfig, world_size: int) -> ParallelLayout:
    megatron = cfg.actor_rollout_ref.actor.megatron
    for name, allowed in (("context_parallel_size", 1), ("use_distributed_optimizer", True)):
        if getattr(megatron, name) != allowed:
            raise ConfigError(
                f"actor_rollout_ref.actor.megatron.{name}={getattr(megatron, name)} is not supported; set {allowed}"
            )
    return trainer_layout(cfg, world_size)


def _optimizer_steps(cfg: RunConfig) -> int | None:
    """Optimizer steps of the whole run, if the config says how long it is."""
    actor = cfg.actor_rollout_ref.actor
    if cfg.trainer.total_training_steps is None:
        return None
    per_step = math.ceil(cfg.data.train_batch_size / actor.ppo_mini_batch_size) * actor.ppo_epochs
    return cfg.trainer.total_training_steps * per_step

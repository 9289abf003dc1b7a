"""Megatron's distributed AdamW with its schedule, taken apart so that a bad gradient changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlhpc.backends.megatron.cpu_shim import cuda_type_names
from rlhpc.backends.megatron.in_place import update_in_place
from rlhpc.config.schema import OptimConfig
from rlhpc.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerShard:
    """What this rank updates of one parameter: elements start..stop of it, flattened in this rank's layout."""

    name: str
    start: int
    stop: int
    master: torch.Tensor  # float32 [stop - start], aliasing the parameter itself when that is float32
    state: dict[str, torch.Tensor]  # step (scalar), exp_avg and exp_avg_sq, float32 [stop - start]

    def of(self, kind: str) -> torch.Tensor:
        """The live tensor of a kind: `master`, or one of MOMENTS."""
        return self.master.detach() if kind == "master" else self.state[kind]


class Optimizer:
    """AdamW over the parameters of `model`, sharded over its data-parallel ranks (ZeRO stage 1).

    One-dimensional parameters (norms) aren't decayed, as is Megatron's rule. The learning rate of the k-th update is
    that of k steps on the schedule: with warm-up it begins at lr / lr_warmup_steps, not at 0.
    """

    def __init__(
        self, model: DistributedDataParallel, cfg: OptimConfig, total_steps: int | None, name: str = "actor"
    ) -> None:
        """`name` is that of the model's section, for errors."""
        self._model = model
        self._clip = cfg.clip_grad
        precision = {"bf16": model.config.bf16, "params_dtype": model.config.params_dtype}
        config = OptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            min_lr=cfg.min_lr,
            weight_decay=cfg.weight_decay,
            adam_beta1=cfg.betas[0],
            adam_beta2=cfg.betas[1],
            adam_eps=cfg.eps,
            clip_grad=cfg.clip_grad,
            use_distributed_optimizer=True,
            **precision,
        )
        with cuda_type_names(), _torch_adamw():
            self._chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        for part in self._parts():
            update_in_place(part)
            for group in part.optimizer.param_groups:
                group["fused"] = True  # Megatron leaves it to torch, which then loops over parameters
                for master in group["params"]:
                    part.optimizer.state[master] = {
                        "step": torch.zeros((), dtype=torch.float32, device=master.device),
                        "exp_avg": torch.zeros_like(master, dtype=torch.float32),
                        "exp_avg_sq": torch.zeros_like(master, dtype=torch.float32),
                    }
        self.schedule = _schedule(self._chained, cfg, total_steps, name)

    def _parts(self) -> list[DistributedOptimizer]:
        """Dense and expert parameters are sharded over different groups, hence two optimizers."""
        parts = getattr(self._chained, "chained_optimizers", [self._chained])
        return [part for part in parts if not part.is_stub_optimizer]

    def zero_grad(self) -> None:
        """As Megatron's zero_grad_buffer, but that experts' gradients are left to be overwritten by the next ones
        (experts.GroupedProduct): zeroing them takes as long as writing them."""
        for parameter in self._model.params_with_grad:
            parameter.grad_added_to_main_grad, parameter.main_grad_is_stale = False, True
        for buffer in (*self._model.buffers, *self._model.expert_parallel_buffers):
            if not all(getattr(parameter, "overwrites_main_grad", False) for parameter in buffer.params):
                buffer.reset()
        for group in (*self._model.bucket_groups, *self._model.expert_parallel_bucket_groups):
            group.reset()
        self._chained.zero_grad()

    def gradient_norm(self) -> float:
        """L2 norm of the whole model's gradient, the same on all ranks; the gradients are then ready to be applied."""
        self._chained.prepare_grads()
        return float(self._chained.get_grad_norm())

    def apply(self, norm: float) -> float:
        """Clips by `norm`, takes one step and gathers the parameters. Returns the learning rate used."""
        self.schedule.step(increment=1)
        excess = (norm + 1e-6) / self._clip if self._clip > 0 else 0.0
        device = next(self._model.module.parameters()).device
        for part in self._parts():  # torch's fused AdamW divides by grad_scale as it goes; found_inf belongs to it
            part.optimizer.grad_scale = torch.tensor(excess, device=device) if excess > 1 else None
            part.optimizer.found_inf = torch.zeros((), device=device) if excess > 1 else None
        self._chained.step_with_ready_grads()
        return float(self._chained.param_groups[0]["lr"])

    def shards(self) -> Iterator[OptimizerShard]:
        names = {parameter: name for name, parameter in self._model.module.named_parameters()}
        for part in self._parts():
            models = (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for model_groups, master_groups in models:
                for parameters, masters in zip(model_groups, master_groups, strict=True):
                    for parameter, master in zip(parameters, masters, strict=True):
                        span = part._get_model_param_range_map(parameter)["param"]
                        state = part.optimizer.state[master]
                        yield OptimizerShard(names[parameter], span.start, span.end, master, state)

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Makes every rank's parameters equal the masters, after those were loaded."""
        for part in self._parts():
            part._copy_main_params_to_model_params()
        self._model.start_param_sync(force_sync=True)


@contextmanager
def _torch_adamw() -> Iterator[None]:
    """While open, Megatron makes torch's AdamW also where Transformer Engine or Apex is installed. Their own keeps its
    step elsewhere and knows no `grad_scale`, by which `apply` clips: it would not be clipped at all."""
    usual = megatron_optimizer.USING_PYTORCH_OPTIMIZER
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    try:
        yield
    finally:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = usual


def _schedule(
    optimizer: object, cfg: OptimConfig, total_steps: int | None, name: str = "actor"
) -> OptimizerParamScheduler:
    if cfg.lr_decay_style not in DECAY_STYLES:
        raise ConfigError(
            f"{name}.optim.lr_decay_style={cfg.lr_decay_style!r} is unknown; choose {', '.join(DECAY_STYLES)}"
        )
    if cfg.lr_decay_style != "constant" and total_steps is None:
        raise ConfigError(
            f"{name}.optim.lr_decay_style={cfg.lr_decay_style} needs the number of steps it ends after; "
            "set trainer.total_training_steps, or lr_decay_style=constant"
        )
    decay_steps = cfg.lr_warmup_steps + 1 if total_steps is None else total_steps
    if cfg.lr_warmup_steps >= decay_steps:
        raise ConfigError(
            f"{name}.optim.lr_warmup_steps={cfg.lr_warmup_steps} must be below the {decay_steps} optimizer steps of "
            "the run; lower it or raise trainer.total_training_steps"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr,
        lr_warmup_steps=cfg.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )

"""A model that is trained, with all that belongs to it: gradients, optimizer, its part of checkpoints. The policy is
one, the critic another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from rlhpc.backends.megatron.attention import PackedSequences
from rlhpc.backends.megatron.in_place import keep_in_place
from rlhpc.backends.megatron.model import Decoder
from rlhpc.backends.megatron.optimizer import Optimizer
from rlhpc.backends.megatron.pipeline import schedule, sum_metrics
from rlhpc.backends.megatron.state import ModelState
from rlhpc.config.schema import OptimConfig
from rlhpc.data.types import PackedBatch
from rlhpc.errors import TrainingError
from rlhpc.layout.spec import ShardSpec

Loss = Callable[[torch.Tensor, PackedBatch, PackedSequences], tuple[torch.Tensor, dict[str, torch.Tensor]]]
Model = TypeVar("Model", bound=Decoder)


class TrainedModel(Generic[Model]):
    """`module` with its gradients summed over microbatches and data-parallel ranks, and AdamW on its shards.

    `name` is that of its metrics. `specs` place the canonical tensors in its parameters, and `prefix` precedes their
    names in checkpoints and elsewhere. `shared` are parameters whose memory is the engine's, by name.
    """

    def __init__(
        self,
        name: str,
        module: Model,
        specs: Sequence[ShardSpec],
        optim: OptimConfig,
        total_steps: int | None,
        *,
        overlap_grad_reduce: bool,
        shared: Mapping[str, torch.Tensor] | None = None,
        prefix: str = "",
    ) -> None:
        self.name, self.module, self.specs, self._prefix = name, module, specs, prefix
        config = module.config
        self.parallel = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap_grad_reduce
            ),
            module,
        )
        if shared:
            keep_in_place(self.parallel, shared)
        if self.parallel.ddp_config.overlap_grad_reduce:
            config.no_sync_func = self.parallel.no_sync  # only the last microbatch's gradients are whole
        config.finalize_model_grads_func = _sum_gradients
        self.optimizer = Optimizer(self.parallel, optim, total_steps, name)
        self.state = ModelState(dict(module.named_parameters()), self.optimizer, specs, dist.get_rank(), prefix)

    def step(self, batches: Sequence[PackedBatch], loss: Loss, before_change: Callable[[], None]) -> dict[str, float]:
        """One optimizer step on the sum of the microbatches' losses. `before_change` comes before it.

        Returns the sums of the losses' metrics, and the gradient's norm and the learning rate. Raises TrainingError on
        all ranks, with nothing changed, for a non-finite loss or gradient.
        """
        no_tokens = torch.zeros((), dtype=torch.int, device=batches[0].input_ids.device)

        def finish(hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences) -> tuple[Any, ...]:
            value, metrics = loss(hidden, batch, packed)
            return value, no_tokens, metrics | {"loss": value.detach()}

        self.module.train()
        self.optimizer.zero_grad()
        metrics = sum_metrics(schedule(self.parallel, batches, finish, forward_only=False))
        norm = self.optimizer.gradient_norm()
        self._check_finite(metrics.pop("loss"), norm, no_tokens.device)
        before_change()
        return metrics | {f"{self.name}/grad_norm": norm, f"{self.name}/lr": self.optimizer.apply(norm)}

    def _check_finite(self, loss: float, norm: float, device: torch.device) -> None:
        """`norm` is the same everywhere, the loss is this rank's: all ranks must raise or none."""
        bad = torch.tensor(float(not (math.isfinite(loss) and math.isfinite(norm))), device=device)
        dist.all_reduce(bad)
        if bad.item():
            self.optimizer.zero_grad()
            raise TrainingError(
                f"non-finite loss or gradient on {int(bad.item())} of {dist.get_world_size()} ranks in optimizer step "
                f"{self.optimizer.schedule.num_steps + 1} of the {self.name} (here loss={loss}, grad_norm={norm}); "
                "weights and optimizer are unchanged. Look at rewards and logprobs of this step; a lower "
                f"{self.name}.optim.lr often helps"
            )

    def part(self, what: str) -> str:
        """The name of its weights, optimizer or gradients among what moves to host memory and back."""
        return self._prefix + what

    def buffers(self) -> dict[str, torch.Tensor]:
        """The parameters, by their names."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def weights(self) -> list[torch.Tensor]:
        """All memory that weights lie in."""
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        return [*(buffer.param_data for buffer in self._grad_buffers()), *frozen]

    def gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self._grad_buffers()]

    def _grad_buffers(self) -> list[Any]:
        return [*self.parallel.buffers, *self.parallel.expert_parallel_buffers]


def _sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's reduction without its division by a token count: the loss is normalised already."""
    finalize_model_grads(model, None, **kwargs)

"""Mixture-of-experts parts: the router and local experts kept as two packed parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch.nn.functional import pad, silu

from rlhpc.backends.megatron.fused import fused
from rlhpc.data.types import PackedBatch
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import ModelFacts


class Router(TopKRouter):
    """Megatron's top-k router with a load-balancing loss that is normalised over the optimizer step, as the policy's
    loss is. Where it chooses by sigmoids its expert bias is a frozen parameter, which `update_biases` moves; Megatron
    has a buffer for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.score_function == "sigmoid":
            bias = torch.zeros(self.num_experts, dtype=torch.float32)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
        self.num_step_tokens = 1  # of all microbatches on all data-parallel ranks
        # This rank's part since it was last cleared, without the coefficient.
        self.register_buffer("balance_loss", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("differing", torch.zeros(2, dtype=torch.int64), persistent=False)  # see replay.Replay
        # How many of this rank's tokens each expert was chosen for, and which of those that come next are to count.
        self.register_buffer("choices", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)
        self.counted: torch.Tensor | None = None

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Megatron's name, after every choice. What a backward computes again isn't counted again."""
        if self.counted is not None:
            self.choices += (routing_map & self.counted[:, None]).sum(0)
            self.counted = None

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """E * sum_e f_e * P_e of a microbatch (arXiv 2101.03961 section 2.2), times its share of the step's tokens.

        f_e is the fraction of assignments that expert e received, P_e its mean probability; `scores` and `routing_map`
        are zero for filler. Megatron's own weighs all microbatches alike and expects that gradients will be divided by
        the number of tokens.
        """
        counts = reduce_from_tensor_model_parallel_region(routing_map.sum(0), self.tp_cp_group)
        fractions = counts / counts.sum()
        loss = scores.shape[1] * (fractions * scores.sum(0)).sum() / self.num_step_tokens
        self.balance_loss += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.config.moe_aux_loss_coeff * loss)


class PackedExperts(torch.nn.Module):
    """SwiGLU experts of this rank.

    `w13` [local_experts, 2 * I / etp, H] holds the gate rows, then the up rows; `w2` is [local_experts, H, I / etp]:
    the layout of vLLM's fused experts, so that publishing them is a copy of whole blocks.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        shape = {"dtype": config.params_dtype, "device": "cpu"}
        self.w13 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * width, config.hidden_size, **shape))
        self.w2 = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size, width, **shape))
        # Routed tokens since `tokens_per_expert` was last cleared, for the balance metrics.
        self.register_buffer("load", torch.zeros(num_local_experts, dtype=torch.int64), persistent=False)
        for parameter, dim in ((self.w13, 1), (self.w2, 2)):
            # Reduced over the expert-data-parallel group, which differs from the dense one as soon as EP, ETP or TP
            # are more than one; and never a tensor-parallel duplicate when the gradient norm is taken.
            parameter.allreduce = False
            set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            # torch's grouped product takes 16-bit rows of a multiple of 16 bytes (aten's _grouped_mm, 2.11 to 2.13).
            grouped = parameter.dtype == torch.bfloat16 and config.hidden_size % 8 == 0 and width % 8 == 0
            parameter.overwrites_main_grad = grouped

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """tokens [N, H] sorted by expert, tokens_per_expert [local_experts], probs [N] -> [N, H], no bias."""
        if torch.is_grad_enabled():  # recomputation runs the first forward without gradients
            self.load += tokens_per_expert.to(self.load.device)
        if self.w13.overwrites_main_grad:
            ends = tokens_per_expert.to(tokens.device).cumsum(0, dtype=torch.int32)
            hidden = GroupedProduct.apply(tokens, self.w13, ends)
            return GroupedProduct.apply(_swiglu(hidden, probs[:, None]), self.w2, ends), None
        counts = tokens_per_expert.tolist()
        blocks = zip(
            tokens.split(counts), probs[:, None].split(counts), self.w13.unbind(), self.w2.unbind(), strict=True
        )
        return torch.cat([_swiglu(x @ w13.t(), p) @ w2.t() for x, p, w13, w2 in blocks]), None


class GroupedProduct(torch.autograd.Function):
    """x [N, K], weight [experts, M, K] -> [N, M]: rows up to ends[0] times weight[0].T, those up to ends[1] times
    weight[1].T and so on; `ends` is int32 [experts].

    Weights of Megatron's data-parallel model have a float32 `main_grad`. Their gradient goes there at once: copied
    while `main_grad_is_stale` (Optimizer.zero_grad leaves it as it was), then added. That is half the traffic of
    zeroing 4 bytes per parameter and adding to them, which for experts is more than their products need.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends) if len(x) else x.new_zeros(0, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), _to_main_grad(weight, torch.zeros_like(weight)), None
        gradient = gradient.contiguous()
        of_weight = torch._grouped_mm(gradient.t(), x, offs=ends)
        return torch._grouped_mm(gradient, weight, offs=ends), _to_main_grad(weight, of_weight), None


def _to_main_grad(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, which autograd gives to the data-parallel model's hook: that only looks whether it is there."""
    if (main_grad := getattr(weight, "main_grad", None)) is not None:
        if weight.main_grad_is_stale:
            _store(main_grad, gradient)
        else:
            main_grad.add_(gradient)
        weight.main_grad_is_stale, weight.grad_added_to_main_grad = False, True
    return gradient


@partial(fused, dynamic=False)
def _store(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """torch's own copy between dtypes reaches less than half of the memory's rate."""
    wide.copy_(narrow)


@fused
def _swiglu(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * routing weight. The weight stands before the linear down projection, as in Megatron."""
    gate, up = hidden.chunk(2, dim=-1)
    return (silu(gate) * up * probs).to(hidden.dtype)


def sparse_layers(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of this pipeline stage that have experts."""
    return [layer for layer in layers if isinstance(layer.mlp, MoELayer)]


def expert_balance(
    layers: Iterable[torch.nn.Module], facts: ModelFacts, layout: ParallelLayout, device: torch.device
) -> dict[str, float]:
    """How far the busiest expert is above the mean load since the last call: (max - mean) / mean per layer (MaxVio,
    arXiv 2408.15664 section 4.1), its maximum and mean over layers with experts. Collective over the world; nothing for
    a dense model."""
    if not facts.num_experts:
        return {}
    ep_rank, local = parallel_state.get_expert_model_parallel_rank(), facts.num_experts // layout.ep
    loads = torch.zeros(facts.num_layers, layout.ep, local, dtype=torch.float64, device=device)
    for layer in sparse_layers(layers):
        loads[layer.layer_number - 1, ep_rank] = layer.mlp.experts.load
        layer.mlp.experts.load.zero_()
    dist.all_reduce(loads)
    loads = loads[facts.num_dense_layers :].flatten(1)
    violation = loads.amax(1) / loads.mean(1).clamp(min=1) - 1
    return {"actor/moe/max_vio": float(violation.max()), "actor/moe/avg_vio": float(violation.mean())}


def of_no_filler(batch: PackedBatch, order: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """bool, of the tokens that this rank routes, as in replay.Routing: those of sequences that were sampled."""
    lengths = batch.cu_seqlens.diff()
    real = torch.repeat_interleave(batch.sequence_ids >= 0, lengths, output_size=batch.num_tokens)[order]
    return pad(real, (0, -len(order) % parts)).chunk(parts)[part]


def start_counting(layers: Iterable[torch.nn.Module]) -> None:
    """Before the microbatches of a step after which `update_biases` comes."""
    for layer in sparse_layers(layers):
        layer.mlp.router.choices.zero_()


@torch.no_grad()
def update_biases(layers: Iterable[torch.nn.Module], rate: float) -> None:
    """Raises the correction bias of each expert that got less than the mean of the step's tokens by `rate`, and lowers
    that of one that got more (arXiv 2408.15664, algorithm 1). Collective over the ranks of a pipeline stage."""
    routers = [layer.mlp.router for layer in sparse_layers(layers)]
    if not routers:
        return
    choices = torch.stack([router.choices for router in routers])
    dist.all_reduce(choices, group=parallel_state.get_tensor_and_data_parallel_group())
    lacking = choices.sum(1, keepdim=True) - choices.shape[1] * choices
    for router, signs in zip(routers, lacking.sign(), strict=True):
        router.expert_bias.add_(signs.to(router.expert_bias.dtype), alpha=rate)


def start_balance_loss(layers: Iterable[torch.nn.Module], num_step_tokens: int) -> None:
    """Before the microbatches of a step, which have `num_step_tokens` on all data-parallel ranks together."""
    for layer in sparse_layers(layers):
        layer.mlp.router.num_step_tokens = num_step_tokens
        layer.mlp.router.balance_loss.zero_()


def balance_loss(layers: Iterable[torch.nn.Module], device: torch.device) -> float:
    """The step's load-balancing loss without its coefficient, summed over layers, each of which gives 1 when its load
    is even. Collective over the world."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for layer in sparse_layers(layers):
        total += layer.mlp.router.balance_loss
    dist.all_reduce(total)
    return float(total)

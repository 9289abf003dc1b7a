"""Tokens to their experts and back."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from rlhpc.backends.megatron.fused import fused


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, which without Transformer Engine adds expert outputs up by atomic operations
    and waits for the device to tell it how many they are. Every token has the same number of experts here, so both
    ways are gathers, in the forward and in the backward; and a rank that holds all experts never waits.
    """

    @classmethod
    def of(cls, layer: MoELayer) -> Dispatcher:
        """For a layer of the model that Megatron's default process groups run."""
        return cls(layer.num_local_experts, layer.local_expert_indices, layer.config, get_default_pg_collection())

    @property
    def _holds_all(self) -> bool:
        return self.ep_size == 1 and self.tp_size == 1

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [.., H], routing_map bool and probs [T, experts] -> tokens [T * top-k, H] sorted by expert and
        their routing weights [T * top-k]."""
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        if self._holds_all:
            self.tokens_per_expert = routing_map.sum(0, dtype=torch.int32)
        else:
            counts = self.preprocess(routing_map)
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        experts, order = by_expert(routing_map, self.config.moe_router_topk)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        self._rows, self._places = order // experts.shape[1], places.view_as(experts)
        tokens = _ToExperts.apply(hidden_states.view(-1, self.hidden_shape[-1]), self._rows, self._places)
        return tokens, probs.gather(1, experts).flatten().index_select(0, order)

    def token_dispatch(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (tokens, probs) if self._holds_all else super().token_dispatch(tokens, probs)

    def dispatch_postprocess(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            (tokens, self.tokens_per_expert, probs) if self._holds_all else super().dispatch_postprocess(tokens, probs)
        )

    def combine_preprocess(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self._holds_all else super().combine_preprocess(outputs)

    def combine_postprocess(self, outputs: torch.Tensor) -> torch.Tensor:
        """Expert outputs [T * top-k, H], in the order of dispatch_preprocess' tokens -> their sums, as hidden_states
        was."""
        return _FromExperts.apply(outputs, self._rows, self._places).view(self.hidden_shape)


def by_expert(routing_map: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int64 [T, top_k], ascending; and where the sorted tokens stand in that table when
    flattened, int64 [T * top_k]: expert by expert, tokens ascending. `routing_map` is bool [T, experts] with top_k
    true in every row."""
    experts = routing_map.nonzero_static(size=len(routing_map) * top_k)[:, 1]
    # A GPU passes over the keys once for every 8 bits of their dtype.
    return experts.view(-1, top_k), experts.short().argsort(stable=True)


class _ToExperts(torch.autograd.Function):
    """x [T, H] -> x[rows] [T * top-k, H]. `places` [T, top-k] says where the copies of each row went."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _sum_of(gradient, *ctx.saved_tensors), None, None


class _FromExperts(torch.autograd.Function):
    """y [T * top-k, H] -> [T, H], each row the sum of those at its `places`: the adjoint of _ToExperts."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _sum_of(y, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


@fused
def _sum_of(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """One place after the other: a thread then reads neighbours of its own row, and keeps the sum in float32."""
    total = y[places[:, 0]].float()
    for k in range(1, places.shape[1]):
        total = total + y[places[:, k]]
    return total.to(y.dtype)

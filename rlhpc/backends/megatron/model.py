"""Policy and critic as Megatron-core GPTModels with rlhpc's attention, experts and norm in their layer spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn import Linear
from torch.nn.functional import linear
from torch.nn.utils import skip_init

from rlhpc.backends.megatron.attention import PackedAttention, PackedSequences, rotary_frequencies
from rlhpc.backends.megatron.dispatch import Dispatcher
from rlhpc.backends.megatron.experts import PackedExperts, Router, of_no_filler, sparse_layers
from rlhpc.backends.megatron.latent import LatentAttentionSubmodules, LatentCoreAttention, LatentSelfAttention
from rlhpc.backends.megatron.logprobs import VocabParallelLogprobs
from rlhpc.backends.megatron.norm import RMSNorm
from rlhpc.backends.megatron.replay import Recording, Replay, Routing
from rlhpc.data.types import PackedBatch
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import ModelFacts, padded_vocab_size

_MLP_LINEARS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
_SPLIT_MODULES = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def transformer_config(
    facts: ModelFacts,
    layout: ParallelLayout,
    dtype: torch.dtype,
    *,
    attention: AttnBackend = AttnBackend.local,
    recompute: bool,
    recompute_modules: Sequence[str] = (),
    balance_coeff: float = 0.0,
) -> TransformerConfig:
    """What Megatron needs of `facts`. The backward computes whole layers again (`recompute`), or these parts of each:
    core_attn, mlp, moe. Losses carry their global normaliser, so gradients are plain sums over
    microbatches and data-parallel ranks: calculate_per_token_loss without a token count does just that."""
    last_stage = facts.stage(layout.pp - 1, layout.pp)
    return TransformerConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.num_heads,
        num_query_groups=facts.num_kv_heads,
        kv_channels=facts.v_head_dim,
        softmax_scale=facts.softmax_scale,
        ffn_hidden_size=facts.intermediate_size or facts.moe_intermediate_size,
        num_moe_experts=facts.num_experts or None,
        moe_ffn_hidden_size=facts.moe_intermediate_size or None,
        moe_router_topk=facts.experts_per_token,
        # softmax over the chosen logits equals softmax over all, then top-k, then renormalisation
        moe_router_pre_softmax=not facts.norm_topk_prob,
        moe_router_dtype="fp32",
        **_routing(facts),
        moe_shared_expert_intermediate_size=facts.shared_intermediate_size or None,
        moe_router_load_balancing_type="aux_loss" if balance_coeff else "none",
        moe_aux_loss_coeff=balance_coeff,
        moe_token_dispatcher_type="alltoall",
        layernorm_epsilon=facts.norm_eps,
        qk_layernorm=facts.qk_norm,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=attention,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        num_layers_in_last_pipeline_stage=None if facts.num_layers % layout.pp == 0 else len(last_stage),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        calculate_per_token_loss=True,
        perform_initialization=False,  # weights are always loaded
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if recompute else "selective" if recompute_modules else None,
        recompute_modules=list(recompute_modules),
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _routing(facts: ModelFacts) -> dict[str, Any]:
    """Where it isn't softmax over all experts. The router makes its correction biases itself (experts.Router)."""
    if (routing := facts.sigmoid_routing) is None:
        return {}
    limited = routing.groups_per_token < routing.num_groups
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": routing.num_groups if limited else None,
        "moe_router_group_topk": routing.groups_per_token if limited else None,
        "moe_router_topk_scaling_factor": routing.scale,
    }


def _layer_spec(facts: ModelFacts, *, sparse: bool) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention_spec(facts),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts_spec(facts) if sparse else ModuleSpec(module=MLP, submodules=_MLP_LINEARS),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(facts: ModelFacts) -> ModuleSpec:
    if facts.latent:
        return ModuleSpec(
            module=LatentSelfAttention,
            params={"latent": facts.latent},
            submodules=LatentAttentionSubmodules(core_attention=LatentCoreAttention, linear_proj=RowParallelLinear),
        )
    head_norm = RMSNorm if facts.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _experts_spec(facts: ModelFacts) -> ModuleSpec:
    shared = ModuleSpec(module=SharedExpertMLP, submodules=_MLP_LINEARS) if facts.shared_intermediate_size else None
    submodules = MoESubmodules(experts=ModuleSpec(module=PackedExperts), router=Router, shared_experts=shared)
    return ModuleSpec(module=MoELayer, submodules=submodules)


class Decoder(GPTModel):
    """This pipeline stage of a decoder. Its parameters carry the names of reshard.families' trainer specs.

    The last stage returns final hidden states instead of logits. Where a microbatch brings a routing, the routers
    follow it if `replays_routing`, and count in evaluation how often they would go elsewhere; without one, their own
    choice goes into `recording` where there is such. In training routers count whom they choose if `counts_choices`.
    """

    replays_routing = counts_choices = False
    recording: Recording | None = None

    def __init__(self, config: TransformerConfig, facts: ModelFacts) -> None:
        self.facts = facts
        tp = config.tensor_model_parallel_size
        stage = facts.stage(parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size)
        sparse = (facts.num_experts > 0 and layer >= facts.num_dense_layers for layer in stage)
        specs = [_layer_spec(facts, sparse=each) for each in sparse]
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
            vocab_size=padded_vocab_size(facts.vocab_size, tp),
            max_sequence_length=facts.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none",  # PackedAttention applies rotary angles
            share_embeddings_and_output_weights=facts.tied_embeddings,
        )
        self.register_buffer("frequencies", rotary_frequencies(facts), persistent=False)
        for layer in sparse_layers(self.decoder.layers):
            layer.mlp.token_dispatcher = Dispatcher.of(layer.mlp)
        for module in self.modules():  # Megatron marks them while initialising, which is skipped
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if isinstance(module, _SPLIT_MODULES) and module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)

    def _is_in_embd_group(self) -> bool:
        """Asked only to decide about broadcasting tied embeddings between stages; here both load theirs."""
        return False

    def pack(self, batch: PackedBatch) -> PackedSequences:
        tp = self.config.tensor_model_parallel_size
        packed = PackedSequences.of(batch, frequencies=self.frequencies, dtype=self.config.params_dtype, multiple=tp)
        part = parallel_state.get_tensor_model_parallel_rank()
        packed.routing = Routing.of(batch, packed.order, tp, part)
        if self.counts_choices:
            packed.counted = of_no_filler(batch, packed.order, tp, part)
        return packed

    def forward(self, packed: PackedSequences) -> torch.Tensor:
        """Hidden states [T / tp, 1, H] for the next stage, or the last stage's final ones, in `packed.order`."""
        if self.training:
            for router in self.routers().values():
                router.counted = packed.counted
        self._route(packed)
        filler = self._filler_mask(packed) if self.config.moe_aux_loss_coeff else None
        hidden = super().forward(
            packed.input_ids, packed.position_ids, None, packed_seq_params=packed, padding_mask=filler
        )
        if packed.routing and hidden.requires_grad:  # other microbatches may come before the backward recomputes this
            hidden.register_hook(lambda gradient: self._route(packed))
        return hidden

    def routers(self) -> dict[int, Router]:
        """Of this stage's layers that have experts, by the layer's index in the whole model."""
        return {layer.layer_number - 1: layer.mlp.router for layer in sparse_layers(self.decoder.layers)}

    def _route(self, packed: PackedSequences) -> None:
        tp = self.config.tensor_model_parallel_size
        records = self.recording.begin(packed.order, tp) if self.recording else {}
        for layer, router in self.routers().items():
            router.router_replay = records.get(layer)
            if packed.routing:
                experts, count = packed.routing.experts[:, layer], None if self.training else router.differing
                router.router_replay = Replay(experts, packed.routing.known, self.replays_routing, count)

    def _filler_mask(self, packed: PackedSequences) -> torch.Tensor:
        """True [1, T] where a token only fills T up, and must not be balanced: the embedding of id 0 may be zero, and
        the gradient of a norm is nearly infinite there. Megatron splits the mask over ranks in the first stage only."""
        filler = torch.arange(packed.input_ids.shape[1], device=packed.input_ids.device)[None] >= len(packed.order)
        if self.config.sequence_parallel and not self.pre_process:
            group = parallel_state.get_tensor_model_parallel_group()
            filler = filler.chunk(group.size(), dim=1)[group.rank()]
        return filler

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class PolicyModel(Decoder):
    """The logits of predicting positions alone are made, and those a few at a time."""

    def logprobs(
        self, hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs, entropies) float32 [T], aligned with `batch`: entry t speaks of input_ids[t + 1]; 0 where
        loss_mask is 0. `hidden` is the last stage's output."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        place = torch.empty_like(packed.order)
        place[packed.order] = torch.arange(len(packed.order), device=place.device)
        predicting = batch.loss_mask.nonzero()[:, 0]
        group = parallel_state.get_tensor_model_parallel_group()
        weight = self.shared_embedding_or_output_weight() if self.facts.tied_embeddings else self.output_layer.weight
        start = len(weight) * group.rank()
        rows = max(0, min(len(weight), self.facts.vocab_size - start))
        values = VocabParallelLogprobs.apply(
            hidden[:, 0].index_select(0, place[predicting]),
            weight[:rows],
            batch.input_ids[predicting + 1],
            start,
            temperature,
            group,
        )
        zeros = torch.zeros(batch.num_tokens, dtype=torch.float32, device=hidden.device)
        logprobs, entropies = (zeros.index_copy(0, predicting, value) for value in values)
        return logprobs, entropies


class ValueModel(Decoder):
    """A decoder whose output layer has one row: what is still to come, judged at each position."""

    def __init__(self, config: TransformerConfig, facts: ModelFacts) -> None:
        super().__init__(config, replace(facts, tied_embeddings=False))
        if self.post_process:
            self.output_layer = skip_init(Linear, facts.hidden_size, 1, bias=False, dtype=config.params_dtype)
            # Each tensor-parallel rank multiplies its part of the sequence: Megatron adds up their gradients.
            self.output_layer.weight.sequence_parallel = config.sequence_parallel

    def values(self, hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences) -> torch.Tensor:
        """float32 [T], aligned with `batch`: entry t is the value before input_ids[t + 1] is chosen; 0 where loss_mask
        is 0. `hidden` is the last stage's output."""
        values = linear(hidden[:, 0].float(), self.output_layer.weight.float())[:, 0]
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        values = torch.zeros_like(values).index_copy(0, packed.order, values[: len(packed.order)])
        return torch.where(batch.loss_mask > 0, values[: batch.num_tokens], 0.0)

"""The trainer on megatron-core: one rank of it, for every parallel layout but context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend

from rlhpc.backends.megatron import cpu_shim
from rlhpc.backends.megatron.attention import PackedSequences
from rlhpc.backends.megatron.attention_backend import Heads, attention_backend
from rlhpc.backends.megatron.experts import (
    balance_loss,
    expert_balance,
    start_balance_loss,
    start_counting,
    update_biases,
)
from rlhpc.backends.megatron.in_place import place_experts
from rlhpc.backends.megatron.loss import microbatch_loss, microbatch_value_loss
from rlhpc.backends.megatron.model import PolicyModel, ValueModel, transformer_config
from rlhpc.backends.megatron.offload import RESERVE_BYTES, HostCopy, check_room
from rlhpc.backends.megatron.pipeline import num_step_tokens, on_device, per_token
from rlhpc.backends.megatron.replay import Recording, clear_counts, routing_difference
from rlhpc.backends.megatron.state import load, saved, told_to_all
from rlhpc.backends.megatron.trained import Model, TrainedModel
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.checkpoint.pieces import CRITIC_PREFIX
from rlhpc.config.algorithm import needs_reference
from rlhpc.config.critic import Critic, critic_model_config, needs_critic
from rlhpc.config.model_fit import trainer_problems
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schedule import optimizer_steps
from rlhpc.config.schema import RunConfig
from rlhpc.data.types import PackedBatch
from rlhpc.errors import ConfigError, raise_problems
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import ModelFacts, family_for
from rlhpc.reshard.families.family import SCORE
from rlhpc.reshard.hf import load_hf, save_hf
from rlhpc.train.protocols import LossSpec, TrainerState, ValueLossSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Source(NamedTuple):
    """An HF directory, what its model is like, `specs` that place its tensors in parameters, and what computes its
    attention."""

    directory: Path
    facts: ModelFacts
    specs: Sequence[ShardSpec]
    attention: AttnBackend


class MegatronTrainer:
    """Implements train.protocols.Trainer. torch.distributed must be initialised, its world being the trainer's.

    `shared` are tensors that the policy's experts are to be, by parameter names: their memory is the engine's. In
    bfloat16, with experts that no other rank has. `policy`, `critic` (None without one) and `layout` are there to be
    looked into.
    `cfg` is what config.checks lets pass. Raises ConfigError for what only a rank can know, ModelError for an unusable
    model directory.
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
        self._cfg, self._device = cfg, _device(device)
        raise_problems(trainer_problems(cfg))
        self.layout = trainer_layout(cfg, dist.get_world_size())
        actor, dtype = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model.dtype
        specs = family_for(hf_config).trainer_specs(hf_config, self.layout, dtype)
        self._source = source = self._source_of(Path(model_dir), hf_config, specs)
        self._balance_coeff = actor.megatron.moe_aux_loss_coeff
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.layout.tp,
            pipeline_model_parallel_size=self.layout.pp,
            expert_model_parallel_size=self.layout.ep,
            expert_tensor_parallel_size=self.layout.etp,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(cfg.seed)

        policy = self._build(PolicyModel, source, shared)
        if actor.megatron.freeze_moe_router:
            for name, parameter in policy.named_parameters():
                if name.endswith("mlp.router.weight"):
                    parameter.requires_grad_(False)
        policy.counts_choices = actor.megatron.moe_router_bias_update_rate > 0
        policy.replays_routing = actor.megatron.router_replay.mode != "disabled"
        overlap = actor.megatron.overlap_grad_reduce
        steps = optimizer_steps(cfg, actor)
        self.policy = TrainedModel(
            "actor", policy, source.specs, actor.optim, steps, overlap_grad_reduce=overlap, shared=shared
        )
        self._reference = (
            self._build(PolicyModel, source).requires_grad_(False).eval() if needs_reference(cfg) else None
        )
        self.critic = self._build_critic(hf_config) if needs_critic(cfg) else None
        self._host = self._host_copy()
        if self._device.type == "cuda":
            with told_to_all():
                check_room(self._host, cfg.actor_rollout_ref.rollout.gpu_memory_utilization)

    def _source_of(self, directory: Path, hf_config: Mapping[str, Any], specs: Sequence[ShardSpec]) -> Source:
        ref, facts = self._cfg.actor_rollout_ref, family_for(hf_config).model_facts(hf_config)
        value_size = facts.latent.v_dim if facts.latent else None
        heads = Heads.of(facts.num_heads, facts.num_kv_heads, facts.head_dim, self.layout.tp, value_size)
        wanted, dtype = ref.actor.megatron.attention_backend, DTYPES[ref.model.dtype]
        return Source(directory, facts, specs, attention_backend(wanted, self._device, dtype, heads))

    def _build(self, kind: type[Model], source: Source, shared: Mapping[str, torch.Tensor] | None = None) -> Model:
        ref, is_critic = self._cfg.actor_rollout_ref, kind is ValueModel
        layers = (Critic.of(self._cfg) if is_critic else ref.model).enable_gradient_checkpointing
        config = transformer_config(
            source.facts,
            self.layout,
            DTYPES[ref.model.dtype],
            attention=source.attention,
            recompute=layers,
            recompute_modules=[] if layers else ref.actor.megatron.recompute_modules,
            balance_coeff=0.0 if is_critic else self._balance_coeff,
        )
        model = kind(config, source.facts)
        if shared:
            place_experts(model, shared)
        for parameter in model.parameters():
            parameter.data.zero_()  # padded vocabulary rows belong to no tensor of the file
        model.to(self._device)
        with told_to_all():
            buffers = {name: parameter.data for name, parameter in model.named_parameters()}
            load_hf(source.directory, [s for s in source.specs if s.name != SCORE], dist.get_rank(), buffers)
        return model

    def _build_critic(self, hf_config: Mapping[str, Any]) -> TrainedModel[ValueModel]:
        """Its decoder is that of critic.model.path, its head zero: every value begins as 0."""
        critic, config = Critic.of(self._cfg), critic_model_config(self._cfg, hf_config)
        specs = family_for(config).critic_specs(config, self.layout, self._cfg.actor_rollout_ref.model.dtype)
        directory = critic.path if self._cfg.critic.model.path else self._source.directory
        source = self._source_of(directory, config, specs)
        return TrainedModel(
            "critic",
            self._build(ValueModel, source),
            specs,
            self._cfg.critic.optim,
            optimizer_steps(self._cfg, critic),
            overlap_grad_reduce=self._cfg.actor_rollout_ref.actor.megatron.overlap_grad_reduce,
            prefix=CRITIC_PREFIX,
        )

    # --- layout and weights

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.coords(dist.get_rank()).dp

    @property
    def data_parallel_size(self) -> int:
        return self.layout.dp

    def source_specs(self) -> Sequence[ShardSpec]:
        return self._source.specs

    def source_buffers(self) -> Mapping[str, torch.Tensor]:
        return self.policy.buffers()

    def save_hf(self, directory: Path) -> None:
        specs, buffers = self._source.specs, self.source_buffers()
        save_hf(directory, specs, dist.get_rank(), dist.group.WORLD, buffers, self._source.directory)

    # --- forward and backward

    def logprobs(self, batches: Sequence[PackedBatch], *, temperature: float, model: str) -> list[torch.Tensor]:
        """See Trainer. `temperature` divides the logits; it must be positive."""
        if model == "reference" and self._reference is None:
            raise ConfigError(
                "reference logprobs need the reference model; set actor_rollout_ref.actor.use_kl_loss or "
                "algorithm.use_kl_in_reward"
            )
        module = self.policy.module if model == "policy" else self._reference
        assert module is not None
        batches = on_device(batches, self._device)
        clear_counts(module.routers().values())
        self._host.wait_for("weights" if model == "policy" else "reference")
        if model == "policy" and self._reference:
            self._host.bring("reference")  # what comes next, during these
        elif self.critic:
            self._host.bring(self.critic.part("weights"))

        def of_hidden(hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences) -> torch.Tensor:
            return module.logprobs(hidden, batch, packed, temperature)[0]

        return per_token(module, batches, of_hidden)

    def routed_logprobs(
        self, batches: Sequence[PackedBatch], *, temperature: float
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        """See Trainer."""
        policy = self.policy.module
        policy.recording = recording = Recording(policy.routers(), self._source.facts)
        values = self.logprobs(batches, temperature=temperature, model="policy")
        policy.recording = None
        return values, recording.whole()

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """See Trainer."""
        assert self.critic is not None, "values need algorithm.adv_estimator=gae"
        batches = on_device(batches, self._device)
        self._host.wait_for(self.critic.part("weights"))
        return per_token(self.critic.module, batches, self.critic.module.values)

    def step(self, batches: Sequence[PackedBatch], loss: LossSpec | ValueLossSpec) -> dict[str, float]:
        """See Trainer. Raises TrainingError on all ranks, with nothing changed, for a non-finite loss or gradient."""
        batches = on_device(batches, self._device)
        model = self.critic if isinstance(loss, ValueLossSpec) else self.policy
        assert model is not None, "a critic's step needs algorithm.adv_estimator=gae"
        weights, optimizer = model.part("weights"), model.part("optimizer")
        self._host.wait_for(weights)
        self._host.bring(optimizer)  # during forward and backward
        self._host.take_scratch()
        before_change = partial(self._host.before_change, weights, optimizer)
        if isinstance(loss, ValueLossSpec):
            return self._step_critic(batches, loss, before_change)
        return self._step_policy(batches, loss, before_change)

    def _step_policy(
        self, batches: Sequence[PackedBatch], loss: LossSpec, before_change: Callable[[], None]
    ) -> dict[str, float]:
        module = self.policy.module
        layers = module.decoder.layers

        def of_hidden(hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences) -> tuple[Any, ...]:
            logprobs, entropies = module.logprobs(hidden, batch, packed, loss.temperature)
            return microbatch_loss(logprobs, entropies, batch, loss)

        if self._balance_coeff:
            start_balance_loss(layers, num_step_tokens(batches, self._device))
        if module.counts_choices:
            start_counting(layers)
        metrics = self.policy.step(batches, of_hidden, before_change)
        if module.counts_choices:
            update_biases(layers, self._cfg.actor_rollout_ref.actor.megatron.moe_router_bias_update_rate)
        # The caller sums over data-parallel ranks.
        balance = expert_balance(layers, self._source.facts, self.layout, self._device)
        if self._balance_coeff:
            balance["actor/moe/aux_loss"] = balance_loss(layers, self._device)
        if self._cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay:  # as found with the rollout's weights
            balance["training/rollout_routing_diff"] = routing_difference(module.routers().values(), self._device)
        return metrics | {name: value / self.layout.dp for name, value in balance.items()}

    def _step_critic(
        self, batches: Sequence[PackedBatch], loss: ValueLossSpec, before_change: Callable[[], None]
    ) -> dict[str, float]:
        assert (critic := self.critic) is not None

        def of_hidden(hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences) -> tuple[Any, ...]:
            return microbatch_value_loss(critic.module.values(hidden, batch, packed), batch, loss)

        return critic.step(batches, of_hidden, before_change)

    # --- memory

    @property
    def host_bytes(self) -> int:
        return self._host.num_bytes

    def _host_copy(self) -> HostCopy:
        megatron, on_gpu = self._cfg.actor_rollout_ref.actor.megatron, self._device.type == "cuda"
        parts: dict[str, list[torch.Tensor]] = {}
        scratch: dict[str, list[torch.Tensor]] = {}
        leave: dict[str, bool | str] = {"reference": megatron.param_offload}
        for model in self._models():
            keys = Critic.of(self._cfg) if model is self.critic else megatron
            leave[model.part("weights")], leave[model.part("optimizer")] = keys.param_offload, keys.optimizer_offload
            leave[model.part("gradients")] = keys.grad_offload
            parts[model.part("weights")], scratch[model.part("gradients")] = model.weights(), model.gradients()
        parts["reference"] = list(self._reference.parameters()) if self._reference else []
        parts |= {model.part("optimizer"): list(model.state.tensors()) for model in reversed(self._models())}
        staying = [name for name in leave if not (leave[name] and on_gpu)]
        filling, room = [name for name in leave if leave[name] == "auto"], 0
        if filling and on_gpu:
            engine_share = self._cfg.actor_rollout_ref.rollout.gpu_memory_utilization
            room = int((1 - engine_share) * torch.cuda.mem_get_info()[1]) - RESERVE_BYTES
        host = HostCopy(parts, scratch, staying, filling, room)
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
        return saved([model.state for model in self._models()], self._host.resident)

    def load_checkpoint(self, directory: Path) -> None:
        """See Trainer. The trainer is awake afterwards."""
        models = self._awake_to_change()
        with told_to_all():
            load([model.state for model in models], read_manifest(directory), self.layout, self._cfg.seed)
        for model in models:
            model.optimizer.publish_masters()

    def load_weights(self, source: Path) -> None:
        """See Trainer. The trainer is awake afterwards."""
        self._awake_to_change()
        with told_to_all():
            self.policy.state.load_weights(Path(source))
        self.policy.optimizer.publish_masters()

    def _models(self) -> list[TrainedModel[Any]]:
        return [self.policy, *([self.critic] if self.critic else [])]

    def _awake_to_change(self) -> list[TrainedModel[Any]]:
        self.wake()
        for model in self._models():
            self._host.before_change(model.part("weights"), model.part("optimizer"))
        return self._models()


def _device(name: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if name.startswith("cuda") else torch.device(name)

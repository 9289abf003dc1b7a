"""What a configuration asks of the machine, as text: process grids, parameters, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rlhpc.config.checks import device_of
from rlhpc.config.critic import Critic, critic_model_config, needs_critic
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schedule import updates_per_step
from rlhpc.config.schema import RunConfig
from rlhpc.memory.device import KvCache, activations, doubtful, gpu_bytes, kv_cache, microbatch, phases
from rlhpc.memory.reads import describe_reads
from rlhpc.memory.state import (
    NodeMemory,
    RankMemory,
    critic_parameters,
    node_memory,
    parameter_counts,
    rank_memory,
    readable,
    routing_bytes,
)
from rlhpc.reshard.families import model_facts


def describe(cfg: RunConfig, model_config: Mapping[str, Any]) -> str:
    """The plan as text: grids, batch, parameters and the fullest rank's memory."""
    return "\n".join(_lines(cfg, model_config))


def _lines(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[str]:
    ref, layout = cfg.actor_rollout_ref, trainer_layout(cfg)
    total, active = parameter_counts(model_config)
    replicas = layout.world_size // ref.rollout.tensor_model_parallel_size
    batch = cfg.data.train_batch_size
    model = f"{model_config['model_type']}, {ref.model.dtype}"
    yield f"model     {model}, {total:,} parameters, {active:,} per token"
    if needs_critic(cfg):
        of_critic = critic_parameters(cfg, model_config)
        kind = critic_model_config(cfg, model_config)["model_type"]
        yield f"critic    {kind}, {ref.model.dtype}, {of_critic:,} parameters"
    yield f"ranks     {layout.world_size} = {_counted(cfg.trainer.nnodes, 'node')} * {cfg.trainer.n_gpus_per_node}"
    yield f"trainer   dense    tp={layout.tp} cp={layout.cp} pp={layout.pp} dp={layout.dp}"
    yield f"          experts  etp={layout.etp} ep={layout.ep} pp={layout.pp} edp={layout.edp}"
    tp, ep = ref.rollout.tensor_model_parallel_size, ref.rollout.expert_parallel_size
    yield f"rollout   {_counted(replicas, 'replica')} of tp={tp} ep={ep}"
    yield (
        f"step      {batch} prompts * n={ref.rollout.n} = {batch * ref.rollout.n} trajectories, "
        f"{_counted(updates_per_step(cfg, ref.actor), 'optimizer step')}{_of_critic(cfg)}"
    )
    if cfg.algorithm.filter_groups.enable:
        yield f"          out of {cfg.data.draw_size} prompts drawn at a time, until as many have answers that differ"
    if ref.rollout.enable_rollout_routing_replay or ref.actor.megatron.router_replay.mode == "R2":
        yield (
            f"routing   at most {readable(routing_bytes(cfg, model_config))} a step, twice, in Ray's object store; "
            f"cluster.object_store_bytes gives it {readable(cfg.cluster.object_store_bytes)} before it takes files"
        )
    yield from describe_reads(cfg, model_config)
    yield f"writes    {cfg.run_dir}"
    yield ""
    memory, device = rank_memory(cfg, model_config), device_of(cfg)
    rank = max(range(len(memory)), key=lambda r: memory[r].total)
    yield from _memory_table(rank, memory[rank])
    yield from _working_table(cfg, model_config, memory[rank], device)
    yield from _node_table(node_memory(cfg, model_config, device, memory), device)


def _of_critic(cfg: RunConfig) -> str:
    if not needs_critic(cfg):
        return ""
    warmup = cfg.trainer.critic_warmup
    alone = f"; steps before {warmup} train the critic alone" if warmup > 1 else ""
    return f", the critic's {updates_per_step(cfg, Critic.of(cfg))} before them{alone}"


def _memory_table(rank: int, fullest: RankMemory) -> Iterator[str]:
    yield f"memory of the fullest rank ({rank}), without activations and KV cache"
    rows = {name: size for name, size in asdict(fullest).items() if size or not name.startswith("critic")}
    for name, num_bytes in [*rows.items(), ("total", fullest.total)]:
        yield f"  {name.replace('_', ' '):<18}{readable(num_bytes):>12}"


def _working_table(cfg: RunConfig, model_config: Mapping[str, Any], rank: RankMemory, device: str) -> Iterator[str]:
    """Activations, KV cache and, on GPUs, each phase of a step against the card's memory; and what doesn't fit."""
    gpu = gpu_bytes(cfg) if device == "cuda" else None
    yield "working memory of a rank, at most"
    for name, (made, _) in activations(cfg, model_config, device).items():
        tokens = microbatch(cfg, cfg.actor_rollout_ref.actor if name == "policy" else Critic.of(cfg)).tokens
        yield f"  {f'{name} activations':<18}{readable(made.kept):>12}  kept for the backward of {tokens} tokens"
        if made.head or made.layer:
            what = "logits and their gradients" if made.head > made.layer else "a layer's backward"
            yield f"  {'':<18}{readable(max(made.head, made.layer)):>12}  beside them: {what}"
    cache = kv_cache(cfg, model_facts(model_config), rank, device, gpu)
    yield f"  {'KV cache':<18}{readable(cache.token_bytes):>12}  a token{_holds(cache)}"
    if device == "cuda":
        known = f"of {readable(gpu)}" if gpu else "cluster.gpu_memory_gib would say whether it fits"
        yield f"GPU of the fullest rank by phase, about; {known}"
        for name, size in phases(cfg, model_config, rank, gpu).items():
            yield f"  {name:<18}{readable(size):>12}{'  too much' if gpu and size > gpu else ''}"
    for problem in doubtful(cfg, model_config, device, rank):
        yield f"warning   {problem}"


def _holds(cache: KvCache) -> str:
    if cache.room is None or cache.sequences is None:
        return ""
    tokens = max(0, cache.room) // cache.token_bytes
    sequences = f"{cache.sequences:,.0f}" if cache.sequences >= 10 else f"{cache.sequences:.1f}"
    return f"; {tokens:,} tokens are {sequences} sequences of {cache.longest} (max_num_seqs={cache.at_once})"


def _node_table(node: NodeMemory, device: str) -> Iterator[str]:
    yield "host memory of the fullest node, without processes and libraries"
    rows = [("its ranks" if device == "cpu" else "offloaded", node.ranks)]
    rows += [("checkpoint copies", node.checkpoint_copies), ("total", node.total)]
    for name, num_bytes in rows:
        yield f"  {name:<18}{readable(num_bytes):>12}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

"""Where a run would start from, told and checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.origin import Origin, age_s, find_origin, last_start, none_usable
from rlhpc.checkpoint.pieces import CRITIC_PREFIX, FROZEN_KIND
from rlhpc.checkpoint.store import CheckpointStore, Found
from rlhpc.config.critic import Critic, critic_model_config, needs_critic
from rlhpc.config.model_dir import read_model_config
from rlhpc.config.schema import RunConfig
from rlhpc.config.tree import MISSING, diff, shown
from rlhpc.errors import CheckpointError, ConfigError, ModelError
from rlhpc.metrics.console import duration
from rlhpc.reshard.families import family_for
from rlhpc.reshard.families.family import ROUTER

OF_NO_INTEREST = (
    "cluster", "launch", "model._name_or_path", "model.transformers_version", "resume", "run_dir",
    "trainer.default_local_dir", "trainer.resume_",
)  # fmt: skip
# The rest shows in shapes.
SAME_ARCHITECTURE = (
    "model_type", "num_heads", "num_kv_heads", "head_dim", "latent", "experts_per_token", "sigmoid_routing",
)  # fmt: skip


def own_newest_first(cfg: RunConfig, store: CheckpointStore) -> Iterator[Found]:
    """The run's own checkpoints; see CheckpointStore.newest_first. Raises CheckpointError where it has some and is told
    to begin anew."""
    if cfg.trainer.resume_mode == "disable" and (steps := store.steps()):
        raise CheckpointError(
            f"trainer.resume_mode=disable, but {store.root} holds steps {steps}, which a new run would overwrite; "
            "choose another run_dir (or move that directory away), or resume_mode=auto"
        )
    yield from store.newest_first()


def _own(cfg: RunConfig) -> tuple[CheckpointManifest | None, list[str]]:
    """The newest of the run's own checkpoints that sizes let pass, None without any, and why not newer ones. Raises
    CheckpointError as `own_newest_first` does, and where there are some and none can be used."""
    store = CheckpointStore(cfg.checkpoint_root())
    refused: list[str] = []
    for step, found in own_newest_first(cfg, store):
        if isinstance(found, CheckpointManifest):
            return found, refused
        refused.append(f"step {step}: {found}")
    if refused:
        raise CheckpointError(none_usable(store.root, refused))
    return None, []


def origin_of(cfg: RunConfig) -> Origin | None:
    """What the run begins from where it has no checkpoint of its own; None: the model's directory. Raises ConfigError
    where that can't be."""
    if (named := _named(cfg)) is None:
        return None
    key, path = named
    return find_origin(Path(path), cfg.resume.what if key == "resume.from" else "all", key=key)


def unused_origin(cfg: RunConfig) -> str | None:
    """What to say where a run that has checkpoints of its own is still told to begin from another one."""
    if (named := _named(cfg)) is None:
        return None
    return "{}={} counts no more: the run has checkpoints of its own".format(*named)


def _named(cfg: RunConfig) -> tuple[str, str] | None:
    if cfg.resume.from_ is not None:
        return "resume.from", cfg.resume.from_
    if cfg.trainer.resume_mode == "resume_path":
        return "trainer.resume_from_path", str(cfg.trainer.resume_from_path)
    return None


def check_start(cfg: RunConfig, model_config: Mapping[str, Any]) -> None:
    """Looks at the manifests of the run's own checkpoints; where it has none, at those of what it begins from, or at
    the headers of HF files.

    Raises ConfigError, CheckpointError or ModelError for what would be refused by a rank, hours in a queue later: no
    directory, nothing usable in it, another architecture or shapes, other frozen parameters, a data order that the
    settings don't give.
    """
    if _own(cfg)[0] is not None or (origin := origin_of(cfg)) is None:
        return
    if origin.root is None:
        from rlhpc.reshard.hf import check_hf

        _check_architecture(read_model_config(origin.path, key="resume.from"), model_config, origin)
        check_hf(origin.path, family_for(model_config).canonical_tensors(model_config))
        return
    manifest = origin.manifest
    _check_architecture(origin.settings.get("model"), model_config, origin)
    if difference := manifest.other_than(family_for(model_config).canonical_tensors(model_config), critic=False):
        raise ModelError(
            f"{manifest.directory} is of another model than actor_rollout_ref.model.path: {difference}; give a "
            "checkpoint of the same architecture"
        )
    if origin.what == "all":
        _check_continues(cfg, manifest)
        _check_critic(cfg, model_config, manifest)


def _check_architecture(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any], origin: Origin) -> None:
    if theirs is None:
        return
    old, new = (family_for(config).model_facts(config) for config in (theirs, ours))
    if differing := [name for name in SAME_ARCHITECTURE if getattr(old, name) != getattr(new, name)]:
        told = ", ".join(f"{name} {getattr(old, name)}, not {getattr(new, name)}" for name in differing)
        raise ModelError(
            f"{origin.path} is of another architecture than actor_rollout_ref.model.path: {told}; give one of the same"
        )


def _check_continues(cfg: RunConfig, manifest: CheckpointManifest) -> None:
    """The optimizer's state is that of the parameters that were trained. The order of the data is a function of some
    settings, and the checkpoint's cursor a position in it."""
    frozen = cfg.actor_rollout_ref.actor.megatron.freeze_moe_router
    were_frozen = any(piece.name.endswith(ROUTER) for piece in manifest.pieces(FROZEN_KIND))
    if frozen != were_frozen:
        raise ConfigError(
            f"actor_rollout_ref.actor.megatron.freeze_moe_router={json.dumps(frozen)}, but {manifest.directory} was "
            f"saved with {json.dumps(were_frozen)}, and its optimizer's state is for that; set that, or "
            "resume.what=weights, which begins the optimizer anew"
        )
    cursor, data = manifest.state.get("train", {}).get("cursor", {}), cfg.data
    for name, key, ours in (
        ("batch_size", data.draw_key, data.draw_size),
        ("seed", "seed", cfg.seed),
        ("shuffle", "data.shuffle", data.shuffle),
    ):
        if cursor.get(name) != ours:
            raise ConfigError(
                f"{key}={json.dumps(ours)}, but {manifest.directory} stands in an order of the data drawn with "
                f"{json.dumps(cursor.get(name))}; set that, or resume.what=weights, which begins the data anew"
            )
    total = cfg.trainer.total_training_steps
    if total is not None and manifest.step >= total:
        raise ConfigError(
            f"trainer.total_training_steps={total} leaves nothing to train: {manifest.directory} is of step "
            f"{manifest.step}; set more, or resume.what=weights, which begins at step 0"
        )


def _check_critic(cfg: RunConfig, model_config: Mapping[str, Any], manifest: CheckpointManifest) -> None:
    """It goes on as the policy does, or there is none."""
    weights = "or resume.what=weights, which takes the policy's weights alone"
    if not needs_critic(cfg):
        if manifest.has_critic:
            raise ConfigError(
                f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} has no critic, but {manifest.directory} was "
                f"saved with one; set algorithm.adv_estimator=gae, {weights}"
            )
        return
    if not manifest.has_critic:
        raise ConfigError(
            f"algorithm.adv_estimator=gae needs a critic, but {manifest.directory} was saved without one; set the "
            f"estimator that it was trained with, {weights}"
        )
    config = critic_model_config(cfg, model_config)
    critic = {CRITIC_PREFIX + name: shape for name, shape in family_for(config).critic_tensors(config).items()}
    if difference := manifest.other_than(family_for(model_config).canonical_tensors(model_config) | critic):
        raise ModelError(
            f"the critic in {manifest.directory} is of another model than critic.model.path: {difference}; give the "
            f"model that it began with, {weights}"
        )


def describe_start(cfg: RunConfig, model_config: Mapping[str, Any]) -> list[str]:
    """For a dry run: from which checkpoint the run would go on or begin, and which settings differ. Raises as
    `check_start` does."""
    own, refused = _own(cfg)
    if own is not None:
        told = [f"after step {own.step} from {_told(own)}", *(f"not from {reason}" for reason in refused)]
        told += filter(None, [unused_origin(cfg)])
        return _aligned(told, differing(last_start(Path(cfg.run_dir)), cfg, model_config))
    check_start(cfg, model_config)
    if (origin := origin_of(cfg)) is None:
        return _aligned([f"at step 0 from {cfg.actor_rollout_ref.model.path}", *new_critic(cfg)], [])
    told = [describe_origin(origin), *(new_critic(cfg) if origin.what == "weights" else [])]
    return _aligned(told, differing(settings_of(origin), cfg, model_config))


def _aligned(told: Sequence[str], differing: Sequence[str]) -> list[str]:
    lines = [f"{'' if number else 'starts':<10}{line}" for number, line in enumerate(told)]
    return lines + [f"{'' if number else 'differs':<10}{line}" for number, line in enumerate(differing)]


def new_critic(cfg: RunConfig) -> list[str]:
    """What the critic of a run begins with that doesn't go on from a whole state, in a line; none without one."""
    return [f"the critic with the weights of {Critic.of(cfg).path}, its head at 0"] if needs_critic(cfg) else []


def describe_origin(origin: Origin) -> str:
    """In words, with step and age."""
    if origin.root is None:
        return f"at step 0 with the weights of {origin.path}"
    manifest = origin.manifest
    if origin.what == "weights":
        return f"at step 0 with the weights of {_told(manifest)}"
    return f"after step {manifest.step} with the whole state of {_told(manifest)}"


def differing(settings: Mapping[str, Any], cfg: RunConfig, model_config: Mapping[str, Any]) -> list[str]:
    """A line for each key, old -> new, that a run set otherwise, but for where and how it was started, and for settings
    that its rlhpc didn't have. `settings` is {config, model}, of which either may be missing."""
    ours = {"config": cfg.tree(), "model": dict(model_config)}
    found = [
        (key, old, new)
        for section in ours.keys() & settings.keys()
        for key, old, new in diff({section: settings[section]}, {section: ours[section]})
        if old != MISSING or section == "model"
    ]
    named = [(key.removeprefix("config."), old, new) for key, old, new in sorted(found, key=itemgetter(0))]
    return list(shown(change for change in named if not change[0].startswith(OF_NO_INTEREST)))


def settings_of(origin: Origin) -> Mapping[str, Any]:
    """{config, model} of an origin, as far as they are known."""
    if origin.root is None:
        return {"model": read_model_config(origin.path, key="resume.from")}
    return origin.settings


def _told(manifest: CheckpointManifest) -> str:
    layout = " ".join(f"{axis}={size}" for axis, size in manifest.layout.items() if axis != "world_size")
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}{f' ({layout})' if layout else ''}"
    return f"{manifest.directory}, saved {duration(age_s(manifest))} ago by {ranks}"

"""Command-line overrides, judged before Hydra composes: its errors know neither nearest names nor verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from rlhpc.config.load import MISSING, known_keys, open_section, violations
from rlhpc.errors import raise_problems

REFERENCE, ACTOR = "actor_rollout_ref.ref.megatron.", "actor_rollout_ref.actor.megatron."
DEFAULT_SIZE = "1"  # of every parallel group


def checked(arguments: Sequence[str], config_dir: Path) -> list[str]:
    """`arguments` without the verl keys that change nothing here; raises ConfigError that lists all
    that are wrong."""
    kept, problems, given = [], [], _given(arguments)
    options_elsewhere = any(argument.startswith(("--config-dir", "-cd")) for argument in arguments)
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if refusal := _no_option(argument, config_dir):
            problems.append(refusal)
            continue
        if argument.startswith("-") or ("=" not in argument and before.startswith("-")):
            kept.append(argument)  # a flag of Hydra, or its value
            continue
        if argument.startswith("=") or ("=" not in argument and not argument.startswith("~")):
            problems.append(f"{argument!r} is no override; give KEY=VALUE without blanks, such as seed=1")
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException as error:
            key, _, value = argument.partition("=")
            problems.append(f"{argument}: {error}; quote what isn't plain: '{key}=\"{value}\"'")
            continue
        key = override.key_or_group
        group = config_dir / key
        if key.partition(".")[0].partition("/")[0] == "hydra":
            kept.append(argument)
        elif group.is_dir() and not isinstance(override.value(), dict):
            problems += [] if options_elsewhere else _unknown_options(override, group)
            kept.append(argument)
        elif not _repeats_the_actor(key, given):
            problems += _refusals(override)
            if key in known_keys():
                kept.append(argument.lstrip("+"))
            elif open_section(key):
                kept.append("++" + argument.lstrip("+"))
            # else it was refused, or is a verl key that asks for what rlhpc does anyway
    raise_problems(problems)
    return kept


def _no_option(argument: str, config_dir: Path) -> str | None:
    """What to write for an option that is a setting, which Hydra might take for a beginning of one of its own; or for
    verl's choice of a configuration."""
    if not argument.startswith("--"):
        return None
    name, equals, value = argument[2:].partition("=")
    if name in known_keys() or (name and (config_dir / name).is_dir()):
        return f"{argument}: settings have no dashes; write {name}={value if equals else 'VALUE'}"
    if name in ("config-name", "config-path"):
        return f"{argument}: there is one configuration; remove it (--config-dir=DIR adds files of yours to the groups)"
    return None


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """The values as they were written, by key."""
    return {
        key.lstrip("+"): value for key, equals, value in (argument.partition("=") for argument in arguments) if equals
    }


def _repeats_the_actor(key: str, given: Mapping[str, str]) -> bool:
    """Whether it gives verl's reference policy the layout that the actor is given, which it has here anyway."""
    actors = key.replace(REFERENCE, ACTOR, 1)
    return key.startswith(REFERENCE) and given.get(key) in (given.get(actors, DEFAULT_SIZE), f"${{{actors}}}")


def _unknown_options(override: Override, group: Path) -> list[str]:
    known = sorted(path.stem for path in group.glob("*.yaml"))
    unknown = [option for option in _values(override) if isinstance(option, str) and option not in known]
    return [
        f"{override.key_or_group}={option} is unknown; {_nearest(option, known)}choose {', '.join(known)}"
        for option in unknown
        if option != MISSING
    ]


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _refusals(override: Override) -> list[str]:
    key = override.key_or_group
    if override.is_delete():
        return [f"~{key}: a setting can't be removed; give it another value"]
    return list(dict.fromkeys(problem for value in _values(override) for problem in violations(_tree(key, value))))


def _values(override: Override) -> list[Any]:
    """The value, or each one of a sweep; MISSING for what only composing can tell."""
    if not override.is_sweep_override():
        values = [override.value()]
    elif override.is_discrete_sweep():
        values = [v.text if isinstance(v, QuotedString) else v for v in override.sweep_iterator()]
    else:
        values = [MISSING]
    return [MISSING if isinstance(value, str) and "${" in value else value for value in values]


def _tree(key: str, value: Any) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return {name: _tree(rest, value) if rest else value}

"""What a drill measured, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.drill.plan import PHASES
from scripts.drill.strike import Outcome, milestones

COLUMNS = ("event", "phase", "step", "attempt", "cause", "lost", "repeated", "signal to commit", "save")
MILESTONES = ("ray_ready", "ranks_ready", "restored", "first_publish", "first_rollout")


def heading() -> str:
    return _row(COLUMNS)


def row(outcome: Outcome) -> str:
    event = outcome.event
    return _row((
        event.kind.name, event.phase, outcome.step, outcome.attempt, outcome.cause or "-", outcome.lost,
        outcome.repeated, _seconds(outcome.commit_s), _seconds(outcome.save_s),
    ))  # fmt: skip


def summary(outcomes: Sequence[Outcome], lines: Iterable[dict[str, Any]]) -> str:
    """Events per phase, what was lost, and how long things took."""
    count = {phase: sum(outcome.event.phase == phase for outcome in outcomes) for phase in PHASES}
    told = [outcome for outcome in outcomes if outcome.event.kind.told]
    killed = [outcome for outcome in outcomes if not outcome.event.kind.told]
    starts = [found for line in lines if "first_rollout" in (found := milestones(line))]
    split, before = [], 0.0
    for name in MILESTONES:
        if at := [found[name] for found in starts if name in found]:
            median = statistics.median(at)
            split.append(f"{name} +{median - before:.1f}")
            before = median
    return "\n".join([
        "events per phase: " + ", ".join(f"{phase} {number}" for phase, number in count.items()),
        f"told of its end ({len(told)} events): {_steps(told)}; signal to committed checkpoint: "
        + _spread([outcome.commit_s for outcome in told if outcome.commit_s is not None]),
        f"killed ({len(killed)} events): {_steps(killed)}",
        "job start to first rollout: " + _spread([found["first_rollout"] for found in starts])
        + (f"; medians: {', '.join(split)}" if split else ""),
    ])  # fmt: skip


def _steps(outcomes: Sequence[Outcome]) -> str:
    return (
        f"{sum(o.repeated for o in outcomes)} finished steps repeated, {sum(o.lost for o in outcomes)} begun steps lost"
    )


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    return (
        f"{statistics.median(seconds):.1f} s median, {min(seconds):.1f} to {max(seconds):.1f} s ({len(seconds)} times)"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _row(cells: Sequence[object]) -> str:
    widths = (21, 11, 5, 11, 11, 5, 9, 17, 7)
    return " ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()

"""What a run did, from its metrics.jsonl: a table, and a plot where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhpc.errors import DataError
from rlhpc.metrics.jsonl import MetricsFile
from rlhpc.metrics.timer import phase_seconds

Rows = Sequence[Mapping[str, Any]]
Series = tuple[list[int], list[float]]  # steps, values

LEARNING = (
    "val-core/",
    "critic/score/mean",
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "response_length/mean",
    "training/rollout_logprobs_diff_mean",
    "reward/error_rate",
    "reward/timeout_rate",
    "perf/throughput",
)
VISIBLE_SHARE = 0.005  # of the time; thinner phases would only fill the plot's legend


def report(run_dir: Path, plot: Path | None = None) -> str:
    """The summary of a run as text; writes `plot` (default `run_dir/report.png`) beside it.

    Raises DataError where there is no metrics.jsonl, or no step in it.
    """
    file = run_dir / "metrics.jsonl"
    rows = MetricsFile(file).read()
    if not rows:
        raise DataError(f"{file} is missing or empty; give the run_dir of a run that has logged a step")
    lines = [
        f"{run_dir}: steps {rows[0]['step']} to {rows[-1]['step']}",
        "",
        *_learning(rows),
        "",
        *_timing(rows),
    ]
    if find_spec("matplotlib"):
        lines += ["", f"plot: {write_plot(rows, plot or run_dir / 'report.png')}"]
    else:
        lines += ["", "no plot: matplotlib is not installed; pip install matplotlib"]
    return "\n".join(lines)


def series(rows: Rows, name: str) -> Series:
    """Steps and values of one metric where it was measured and finite."""
    points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return [step for step, _ in points], [float(value) for _, value in points]


def timing_shares(rows: Rows) -> dict[str, tuple[float, float]]:
    """Phase -> (mean seconds a step, share of the steps' whole time), the longest first."""
    whole = sum(row.get("timing_s/step") or 0.0 for row in rows)
    phases = sorted({phase for row in rows for phase in phase_seconds(row)})
    totals = {phase: sum(series(rows, f"timing_s/{phase}")[1]) for phase in phases}
    return {
        phase: (seconds / len(rows), seconds / whole if whole else 0.0)
        for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])
    }


def write_plot(rows: Rows, path: Path) -> Path:
    """A PNG of reward, validation and time per step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, validation, timing = figure.subplots(1, 3)
    reward.plot(*series(rows, "critic/score/mean"))
    reward.set(title="reward of the samples", xlabel="step", ylabel="mean")
    for name in _names(rows, "val-core/"):
        validation.plot(*series(rows, name), marker="o", label=name.removeprefix("val-core/"))
    validation.set(title="validation", xlabel="step")
    if validation.lines:
        validation.legend()
    phases = [f"timing_s/{phase}" for phase, (_, share) in timing_shares(rows).items() if share >= VISIBLE_SHARE]
    steps = [row["step"] for row in rows]
    if phases:
        stacked = [[row.get(name) or 0.0 for row in rows] for name in phases]
        timing.stackplot(steps, stacked, labels=[name.removeprefix("timing_s/") for name in phases])
        timing.legend(*(entries[::-1] for entries in timing.get_legend_handles_labels()), bbox_to_anchor=(1, 1))
    timing.set(title="time", xlabel="step", ylabel="s")
    for axes in (reward, validation, timing):
        axes.xaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"the plot can't be written: {error}; choose another place with --plot PNG") from error
    return path


def _names(rows: Rows, prefix: str) -> list[str]:
    return sorted({name for row in rows for name in row if name.startswith(prefix)})


def _learning(rows: Rows) -> Iterator[str]:
    columns: dict[str, Callable[[list[float]], float]] = {
        "first": lambda v: v[0],
        "last": lambda v: v[-1],
        "mean": fmean,
        "min": min,
        "max": max,
    }
    yield f"{'metric':<40}" + "".join(f"{name:>12}" for name in columns)
    for prefix in LEARNING:
        for name in _names(rows, prefix):
            if values := series(rows, name)[1]:
                yield f"{name:<40}" + "".join(f"{of(values):>12.5g}" for of in columns.values())


def _timing(rows: Rows) -> Iterator[str]:
    yield f"{'phase':<40}{'s per step':>12}{'share':>12}"
    for phase, (seconds, share) in timing_shares(rows).items():
        yield f"{phase:<40}{seconds:>12.3f}{share:>12.1%}"

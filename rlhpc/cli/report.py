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
    "critic/vf_loss",
    "critic/vf_explained_var",
    "response_length/mean",
    "response_length/clip_ratio",
    "training/rollout_logprobs_diff_mean",
    "reward/zero_std_group_ratio",
    "reward/error_rate",
    "reward/timeout_rate",
    "perf/throughput",
)
PANELS = (  # of the plot: title, unit, and metrics by name or, with a slash at the end, all below it
    ("reward of the samples", "mean", ("critic/score/mean",)),
    ("validation", "", ("val-core/",)),
    ("response length", "tokens", ("response_length/mean",)),
    ("shares", "", ("response_length/clip_ratio", "reward/zero_std_group_ratio", "actor/pg_clipfrac")),
    ("entropy", "nats per token", ("actor/entropy",)),
    ("gradient norm", "", ("actor/grad_norm", "critic/grad_norm")),
    ("logprobs, trainer less engine", "mean distance", ("training/rollout_logprobs_diff_mean",)),
    ("throughput", "tokens/s per rank", ("perf/throughput",)),
)
SHORT_NAMES = {
    "response_length/clip_ratio": "cut off",
    "reward/zero_std_group_ratio": "groups of equal rewards",
    "actor/pg_clipfrac": "ratios clipped",
}
COLUMNS = 3
SMOOTHED_FROM = 100  # steps; then a moving mean of a fiftieth of them is drawn over the values
SHOWN_SHARE, VISIBLE_SHARE = 0.0005, 0.005  # of the time: in the table, and in the plot, whose legend would be long


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
    """A PNG of PANELS, each metric over steps, and of where the time of a step goes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = -(-(len(PANELS) + 1) // COLUMNS)
    figure = Figure(figsize=(4.5 * COLUMNS, 3.2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(height, COLUMNS).flat
    names = _names(rows)
    for axes, (title, unit, metrics) in zip(panels, PANELS, strict=False):
        _draw(axes, rows, [name for metric in metrics for name in _below(names, metric)])
        axes.set(title=title, xlabel="step", ylabel=unit)
    _draw_time(panels[len(PANELS)], rows)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise DataError(f"the plot can't be written: {error}; choose another place with --plot PNG") from error
    return path


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Each value's mean with the `width` - 1 before it, as far as there are."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def _draw(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for colour, name in enumerate(names):
        steps, values = series(rows, name)
        many = len(values) >= SMOOTHED_FROM
        style = {"color": f"C{colour}", "label": SHORT_NAMES.get(name, name.removeprefix("val-core/"))}
        if many:
            axes.plot(steps, values, alpha=0.3, color=style["color"])
            values = moving_mean(values, len(values) // 50)
        axes.plot(steps, values, marker="" if many or not name.startswith("val-core/") else "o", **style)
    if len(names) > 1 or any(name.startswith("val-core/") for name in names):
        axes.legend(fontsize="small")


def _draw_time(axes: Any, rows: Rows) -> None:
    phases = [f"timing_s/{phase}" for phase, (_, share) in timing_shares(rows).items() if share >= VISIBLE_SHARE]
    if phases:
        stacked = [[row.get(name) or 0.0 for row in rows] for name in phases]
        axes.stackplot(
            [row["step"] for row in rows], stacked, labels=[name.removeprefix("timing_s/") for name in phases]
        )
        axes.legend(*(entries[::-1] for entries in axes.get_legend_handles_labels()), fontsize="small")
    axes.set(title="time of a step", xlabel="step", ylabel="s")


def _names(rows: Rows) -> list[str]:
    return sorted({name for row in rows for name in row})


def _below(names: Sequence[str], metric: str) -> list[str]:
    """The metric itself, or with a slash at its end all below it."""
    return [name for name in names if name == metric or metric.endswith("/") and name.startswith(metric)]


def _learning(rows: Rows) -> Iterator[str]:
    columns: dict[str, Callable[[list[float]], float]] = {
        "first": lambda v: v[0],
        "last": lambda v: v[-1],
        "mean": fmean,
        "min": min,
        "max": max,
    }
    yield f"{'metric':<40}" + "".join(f"{name:>12}" for name in columns)
    names = _names(rows)
    for metric in LEARNING:
        for name in _below(names, metric):
            if values := series(rows, name)[1]:
                yield f"{name:<40}" + "".join(f"{of(values):>12.5g}" for of in columns.values())


def _timing(rows: Rows) -> Iterator[str]:
    yield f"{'phase':<40}{'s per step':>12}{'share':>12}"
    for phase, (seconds, share) in timing_shares(rows).items():
        if share >= SHOWN_SHARE:
            yield f"{phase:<40}{seconds:>12.3f}{share:>12.1%}"

"""Does a training step depend on the layout? The same batch under every layout and family, against Transformers.

usage: python -m scripts.bench.layouts [--out scripts/bench/results]

Tiny random models in float32 on CPU ranks. Writes layouts-<hardware>.json: loss, gradient norm before clipping, their
relative differences from Transformers' and the largest difference of a token's logprob, in nats.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.machine import RESULTS, hardware, place, versions
from tests.distributed.megatron_reference import CASES, Case, transformers_step, whole_step
from tests.distributed.ranks import run_ranks
from tests.tiny_family import write_tiny_family
from tests.tiny_model import write_tiny_model

VOCAB = {"vocab_size": 319}
DENSE = (
    Case(1, max_tokens=1000),
    Case(2, max_tokens=25),
    Case(2, {"tp": 2}),
    Case(2, {"pp": 2}),
    Case(4, {"tp": 2, "pp": 2}),
    Case(4, {"tp": 4}),
)
MIXTRAL = (
    *DENSE,
    Case(2, {"ep": 2}),
    Case(2, {"etp": 2}),
    Case(4, {"pp": 2, "ep": 2}),
    Case(4, {"ep": 2, "etp": 2}),
    Case(4, {"tp": 2, "ep": 2, "etp": 2}),
)
FAMILIES = {"qwen3_moe": CASES, "mixtral": MIXTRAL, "llama": DENSE, "qwen2": DENSE, "qwen3": DENSE}


def write_models(directory: Path) -> dict[str, Path]:
    models = {"qwen3_moe": write_tiny_model(directory / "qwen3_moe", num_hidden_layers=4, **VOCAB)}
    return models | {
        family: write_tiny_family(directory / family, family) for family in FAMILIES if family not in models
    }


def measure(models: dict[str, Path]) -> list[dict[str, Any]]:
    expected = {family: transformers_step(directory) for family, directory in models.items()}
    rows = [
        {"family": family, "layout": "Transformers", "loss": step["sums"]["loss"], "grad_norm": step["norm"]}
        for family, step in expected.items()
    ]
    for world_size in (1, 2, 4):
        asked = [(family, case) for family in models for case in FAMILIES[family] if case.world_size == world_size]
        calls = [("one_step", {"model_dir": models[family]} | case.arguments) for family, case in asked]
        ranks = run_ranks("tests.distributed.megatron_ranks:in_turn", world_size, 3600.0, calls=calls)
        for (family, case), outcomes in zip(asked, zip(*ranks, strict=True), strict=True):
            rows.append({"family": family} | compare(case, outcomes, expected[family]))
    return sorted(rows, key=lambda row: list(FAMILIES).index(row["family"]))


def compare(case: Case, outcomes: Iterable[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    ranks = list(outcomes)
    found = whole_step(ranks)
    gaps = [np.abs(found["logprobs"][i] - values).max() for i, values in expected["logprobs"].items()]
    return {
        "layout": case.name,
        "ranks": case.world_size,
        "microbatches_per_rank": ranks[0]["num_microbatches"],
        "loss": found["loss"],
        "loss_relative_difference": found["loss"] / expected["sums"]["loss"] - 1,
        "grad_norm": found["norm"],
        "grad_norm_relative_difference": found["norm"] / expected["norm"] - 1,
        "max_logprob_gap": float(max(gaps)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(write_models(Path(directory)))
    report = {
        "command": "python -m scripts.bench.layouts",
        "hardware": hardware(),
        "versions": versions("torch", "megatron-core", "transformers"),
        "steps": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"layouts-{place()}.json").write_text(json.dumps(report, indent=2) + "\n")
    columns = ("loss_relative_difference", "grad_norm_relative_difference", "max_logprob_gap")
    print(f"{'family':10} {'layout':36}", *columns)
    for row in rows:
        values = (f"{row[name]:{len(name)}.1e}" for name in columns if name in row)
        print(f"{row['family']:10} {row['layout']:36}", *values)


if __name__ == "__main__":
    main()

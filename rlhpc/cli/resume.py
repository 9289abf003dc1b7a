"""`rlhpc resume`: what a run was started with, and what may be changed for its next attempt. launch/resume.py composes
and starts it."""

from __future__ import annotations

from pathlib import Path

from rlhpc.checkpoint.identity import RUN_NAME, free, has_trained
from rlhpc.cli.runs import SETTINGS, Run
from rlhpc.cluster.attempt import read_json
from rlhpc.config.load import load, load_file
from rlhpc.config.schema import RunConfig
from rlhpc.config.tree import Change, diff, shown
from rlhpc.errors import ConfigError

WHERE = ("launch", "cluster", "run_dir")  # sections that alter where a run runs, not what it does


def settings_of(directory: Path) -> RunConfig:
    """What a run was started with last, by config.yaml (written for jobs) or run.json (by every driver), whichever is
    newer. Raises ConfigError where neither is."""
    files = [path for name in SETTINGS if (path := directory / name).is_file()]
    if not files:
        raise ConfigError(
            f"{directory} holds no run (neither config.yaml nor {RUN_NAME}); give the run_dir of one, or start it: "
            "python launch/run.py experiment=..."
        )
    newest = max(files, key=lambda path: path.stat().st_mtime)
    if newest.name == RUN_NAME:
        identity = read_json(newest)
        assert identity is not None
        cfg = load(identity["config"])
    else:
        cfg = load_file(newest)
    cfg.run_dir = str(directory)  # it may have been moved
    return cfg


def changes(directory: Path, old: RunConfig, new: RunConfig) -> list[Change]:
    """What the overrides change. Raises ConfigError for what would make it another run, once it has trained a step."""
    found = diff(old.tree(), new.tree())
    if any(key == "run_dir" for key, _, _ in found):
        raise ConfigError("resume can't change run_dir; start another run with launch/run.py run_dir=...")
    binding = [change for change in found if not free(change[0])]
    if binding and has_trained(directory):
        raise ConfigError(
            "\n".join(
                [
                    f"{directory} has trained already; these settings would make it another run:",
                    *(f"  {line}" for line in shown(binding)),
                    "start that with launch/run.py and another run_dir, or leave them out",
                ]
            )
        )
    return found


def finished(cfg: RunConfig) -> bool:
    """Whether the run has come to its end, and `cfg` asks for nothing that it has not done."""
    directory = Path(cfg.run_dir)
    if Run(directory).settled != "finished":
        return False
    return all(key.partition(".")[0] in WHERE for key, _, _ in diff(settings_of(directory).tree(), cfg.tree()))

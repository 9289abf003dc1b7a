"""Hydra entry: compose -> validated configuration -> run here. `python launch/run.py --help` shows how."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT))  # works where rlhpc is not installed; Ray's processes inherit the variable
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach main() as exceptions, bugs keep their traceback

import hydra  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from yaml import YAMLError  # noqa: E402

from launch.overrides import checked  # noqa: E402
from rlhpc.config.load import defaults, load  # noqa: E402
from rlhpc.errors import RlhpcError  # noqa: E402

USER_ERROR = 2


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def start(composed: DictConfig) -> None:
    """Runs one composed configuration; exits on failure, which also ends a sweep."""
    from rlhpc.config.checks import check_run

    try:
        cfg = load(composed)
        hydra_config = HydraConfig.get()
        if hydra_config.mode is RunMode.MULTIRUN:
            cfg.run_dir = f"{cfg.run_dir}/{hydra_config.job.num}"
        model_config = check_run(cfg)
        if cfg.launch.dry_run:
            from rlhpc.cli.plan import describe

            print(describe(cfg, model_config))
            return
        from rlhpc.train.run import run

        status = run(cfg)
    except RlhpcError as error:
        status = refused(error)
    if status:
        raise SystemExit(status)


def refused(error: Exception) -> int:
    """Says what the user can mend, without a traceback."""
    for line in filter(None, str(error).splitlines()):
        print(f"error: {line}", file=sys.stderr)
    return USER_ERROR


def main() -> None:
    """Exits with 0, 2 for what the user can mend, or what the run returned."""
    ConfigStore.instance().store(name="schema", node=defaults())
    try:
        sys.argv[1:] = checked(sys.argv[1:], CONFIGS)
        start()
    except (RlhpcError, HydraException, YAMLError) as error:
        raise SystemExit(refused(error)) from None


if __name__ == "__main__":
    main()

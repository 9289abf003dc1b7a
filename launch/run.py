"""Hydra entry: compose -> validated configuration -> run here or submit. `python launch/run.py --help` shows how."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT))  # works where rlhpc is not installed; Ray's processes inherit the variable
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach main() as exceptions, bugs keep their traceback

try:
    import hydra
except ModuleNotFoundError:
    print(
        f"error: {sys.executable} has no hydra; take the environment that bash scripts/setup.sh makes: "
        "source .venv/bin/activate",
        file=sys.stderr,
    )
    raise SystemExit(2) from None
from hydra.core.config_store import ConfigStore  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from yaml import YAMLError  # noqa: E402

from launch.overrides import checked  # noqa: E402
from rlhpc.config.load import defaults, load  # noqa: E402
from rlhpc.errors import RlhpcError, print_error  # noqa: E402

USER_ERROR = 2


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def start(composed: DictConfig) -> None:
    """Carries one composed configuration out; exits on failure, which also ends a sweep."""
    with ExitCodes():
        from launch.modes import MODES

        cfg = load(composed)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            cfg.run_dir = f"{cfg.run_dir}/{HydraConfig.get().job.num}"
        if status := MODES[cfg.launch.mode](cfg):
            raise SystemExit(status)


class ExitCodes:
    """What a run ends with: 2 for what the user can mend, 1 for a bug. Both leave as SystemExit, because Hydra's
    launchers report a job that merely raised as completed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RlhpcError):
            raise SystemExit(refused(error)) from None
        if isinstance(error, Exception):
            traceback.print_exception(error)
            raise SystemExit(1) from None


def refused(error: Exception) -> int:
    """Says what the user can mend; the exit code."""
    print_error(error)
    return error.exit_code if isinstance(error, RlhpcError) else USER_ERROR


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

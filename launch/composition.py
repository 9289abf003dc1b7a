"""Composing outside Hydra's own main: configs/ and overrides on top of a configuration that is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException

from rlhpc.config.load import load
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError


def composed_from(name: str, stored: str, node: Any, overrides: Sequence[str], config_dir: Path) -> RunConfig:
    """The configuration `name`, with `node` in Hydra's store as `stored`. Raises ConfigError."""
    ConfigStore.instance().store(name=stored, node=node)
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            return load(compose(name, list(overrides)))
    except HydraException as error:
        raise ConfigError(str(error)) from error

"""A dict by name that decorates its entries in and lists the known names when asked for another."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from rlhpc.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """`registry[name]` of an unknown name raises ConfigError; `name in registry` and iteration are a dict's."""

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.setting = setting  # the configuration key that chooses among the entries

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(f"{self.setting}={name!r} is unknown; choose {', '.join(sorted(self))}")

    def add(self, name: str, entry: T) -> None:
        """Raises ConfigError where the name is taken: a silent replacement would change every run that names it."""
        if name in self:
            raise ConfigError(f"{self.setting}={name!r} is already registered; give the new one another name")
        self[name] = entry

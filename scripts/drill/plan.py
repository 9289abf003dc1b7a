"""What interrupts the run, and in which phase: every phase in turn, at a random moment of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PHASES = (
    "start", "restore", "publish", "validate", "save", "generate", "score", "logprobs", "advantages", "update",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A way to be interrupted. `told`: the driver hears of it and saves, so that no finished step is run again."""

    name: str
    told: bool
    partition: str = "low"


PREEMPTED = Kind("preempted", told=True)
PREEMPTED_GRACE = Kind("preempted with grace", told=True, partition="grace")
SIGUSR2 = Kind("SIGUSR2", told=True)
TIME_LIMIT = Kind("time limit", told=True)
REQUEUED = Kind("scontrol requeue", told=True)
DRIVER = Kind("kill -9 driver", told=False)
RANK = Kind("kill -9 rank", told=False)
SUPERVISOR = Kind("kill -9 supervisor", told=False)
NODE = Kind("node lost", told=False)

TOLD = (PREEMPTED, PREEMPTED_GRACE, SIGUSR2, TIME_LIMIT, REQUEUED)
KILLED = (DRIVER, RANK, SUPERVISOR, NODE)


@dataclass(frozen=True)
class Event:
    """`fraction` of the phase is done when it strikes; `steps` is how many steps the attempt may do before."""

    kind: Kind
    phase: str
    fraction: float
    steps: int


def events(count: int, rng: random.Random) -> list[Event]:
    """Alternately an interruption that the driver is told of and one that it isn't, each through all phases before
    one comes again."""
    told, killed = _pairs(TOLD, rng), _pairs(KILLED, rng)
    pairs = [next(killed if number % 2 else told) for number in range(count)]
    return [Event(kind, phase, rng.uniform(0.05, 0.95), rng.randint(1, 3)) for kind, phase in pairs]


def _pairs(kinds: tuple[Kind, ...], rng: random.Random) -> Iterator[tuple[Kind, str]]:
    """Kinds and phases in random order without end. No rank is there to be killed before the phase restore."""
    while True:
        phases, order = rng.sample(PHASES, len(PHASES)), [*kinds] * -(-len(PHASES) // len(kinds))
        rng.shuffle(order)
        first = phases.index("start")
        if order[first] is RANK:
            other = next(place for place, kind in enumerate(order) if kind is not RANK)
            order[first], order[other] = order[other], order[first]
        yield from zip(order, phases, strict=False)

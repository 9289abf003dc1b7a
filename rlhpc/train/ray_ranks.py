"""The driver's way to the ranks: one Ray actor each, all called together, and all ended as soon as one fails."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.schema import RunConfig
from rlhpc.errors import RankLostError, RlhpcError, TrainingError
from rlhpc.train.worker import INTERRUPT_KEY, RankWorker

if TYPE_CHECKING:
    from rlhpc.cluster.placement import Placement

_PATIENCE_S = 0.25  # between two looks at a stop, while ranks are waited for
_FAILURES_S = 2.0  # how long after a first failure those of other ranks are waited for


class RayRanks:
    """All ranks as Ray actors. A call goes to every rank; the first failure ends the run with that rank's error."""

    def __init__(self, cfg: RunConfig, device: str, placement: Placement, log_dir: Path) -> None:
        import ray

        self.world_size = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
        self._master = placement.master
        self._reports: Any = None  # the connection on which the reports of saves are looked for
        self._logs = [log_dir / f"rank-{rank:05d}.log" for rank in range(self.world_size)]
        actor = ray.remote(RankWorker)
        options = {"num_cpus": 1, "num_gpus": 1 if device == "cuda" else 0}
        self._actors = [
            actor.options(**options, resources=placement.resources(rank)).remote(  # type: ignore[attr-defined]
                cfg, rank, self.world_size, device, placement.master, str(self._logs[rank])
            )
            for rank in range(self.world_size)
        ]

    def call(
        self,
        method: str,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        *,
        phase: str = "",
        waiting: Callable[[], None] | None = None,
        **common: Any,
    ) -> list[Any]:
        """Results of `method` in rank order; `per_rank` gives each rank its positional arguments. `waiting` is called a
        few times a second meanwhile; what it raises leaves the ranks to `close`. See Caller."""
        import ray

        arguments = _stored_once(per_rank) if per_rank is not None else [()] * self.world_size
        pending = {
            actor.answer.remote(phase, method, *args, **common): rank
            for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
        }
        results: list[Any] = [None] * self.world_size
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_PATIENCE_S if waiting else None)
            for reference in done:
                rank = pending.pop(reference)
                result, error = _received(reference)
                if error is not None:
                    raise first_failure(method, {rank: error} | _also_failed(pending), self._logs) from error
                results[rank] = result
            if waiting:
                waiting()
        return results

    def interrupt(self) -> None:
        """Has ranks that generate leave it, a second later, with no completions; they never generate again."""
        import torch.distributed as dist

        with suppress(dist.DistError):  # no answer: rank 0 is dead, which the call that waits for it will tell
            self._open_store().set(INTERRUPT_KEY, "1")

    def reports(self, save_id: str) -> list[str] | None:
        """What the ranks' threads told of a save, in rank order; None until all have. See Caller."""
        import torch.distributed as dist

        from rlhpc.train.rank_save import report_key

        keys = [report_key(save_id, rank) for rank in range(self.world_size)]
        try:
            if self._reports is None:
                self._reports = self._open_store()
            if not self._reports.check(keys):
                return None
            reports = [value.decode() for value in self._reports.multi_get(keys)]
            for key in keys:
                self._reports.delete_key(key)
        except dist.DistError as error:
            raise RankLostError(
                f"the store of rank 0, where ranks report what they saved, gives no answer: {error}"
            ) from error
        return reports

    def _open_store(self) -> Any:
        """A connection of its own to the store where the ranks met. Raises DistError where rank 0 is dead."""
        import torch.distributed as dist

        return dist.TCPStore(*self._master, is_master=False, timeout=datetime.timedelta(seconds=5))

    def close(self) -> None:
        """Ends the ranks as they are. Nothing of theirs needs more: their shared memory has no names any more, and the
        session takes what processes they started."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


def _stored_once(per_rank: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The arguments, where several ranks are given the same list (the ranks of a model all have its microbatches), with
    one copy of it in Ray's object store: Ray itself writes one for each call."""
    import ray

    times = Counter(id(argument) for arguments in per_rank for argument in arguments if isinstance(argument, list))
    stored: dict[int, Any] = {}
    for argument in (argument for arguments in per_rank for argument in arguments):
        if times[id(argument)] > 1 and id(argument) not in stored:
            stored[id(argument)] = ray.put(argument)
    return [tuple(stored.get(id(argument), argument) for argument in arguments) for arguments in per_rank]


def first_failure(method: str, errors: dict[int, Any], logs: Sequence[Path]) -> RlhpcError:
    """The error to end with, of those by rank in the order in which they came. A dead rank comes first: where one dies,
    the collectives of others fail, often before its death is known."""
    from ray.exceptions import RayTaskError

    for rank, error in errors.items():
        if not isinstance(error, RayTaskError):  # no answer: its process or its node is gone
            text = logs[rank].read_text(errors="replace") if logs[rank].exists() else ""
            lines = text[text.rfind("\n=== ") + 1 :].splitlines()[-20:]  # of this attempt
            told = [f"rank {rank} died in {method}: {_reason(error)}", f"the end of {logs[rank]}:", *lines]
            return RankLostError("\n".join(told))
    for error in errors.values():
        if isinstance(error.cause, RlhpcError):
            return error.cause
    rank, error = next(iter(errors.items()))
    return TrainingError(
        f"rank {rank} failed in {method}: {type(error.cause).__name__}: {error.cause}\n"
        f"the traceback is at the end of {logs[rank]}"
    )


def _received(reference: Any) -> tuple[Any, Any]:
    """A rank's result, or its error."""
    import ray

    try:
        return ray.get(reference), None
    except ray.exceptions.RayError as error:
        return None, error


def _also_failed(pending: dict[Any, int]) -> dict[int, Any]:
    """The errors of other ranks that arrive shortly after a first one, by rank."""
    import ray

    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_FAILURES_S) if pending else ([], [])
    errors = {pending[reference]: _received(reference)[1] for reference in done}
    return {rank: error for rank, error in errors.items() if error is not None}


def _reason(error: Exception) -> str:
    """Why a rank gave no answer, in Ray's words without its table of ids and its list of guesses."""
    from ray.exceptions import OutOfMemoryError

    if isinstance(error, OutOfMemoryError):
        return (
            "the machine ran out of memory, and Ray ended the largest process before the kernel would; end what else "
            "runs there, or lower actor.ppo_max_token_len_per_gpu, rollout.cpu_kv_cache_gib or trainer.n_gpus_per_node"
        )
    sentences = " ".join(line.strip() for line in str(error).splitlines() if not line.startswith("\t"))
    sentences = sentences.partition(" Some common causes")[0]
    if detail := re.search(r"Worker exit detail: (.*)", sentences):
        return f"its process was killed or crashed ({detail[1].rstrip('.')})"
    return sentences

"""One rank: a Megatron rank and its in-process vLLM rank in one process, and the Ray actor that carries them.

This file is where Ray meets training. `RankWorker` is what an actor runs; `RayRanks` is the driver's way to call all of
them together, ending everything as soon as one fails.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.session import TOKEN_VARIABLE, ident_of
from rlhpc.config.in_place import shared_experts
from rlhpc.config.schema import RunConfig
from rlhpc.errors import RankLostError, RlhpcError, TrainingError
from rlhpc.train.usage import Usage

if TYPE_CHECKING:  # a worker sets its environment before torch is first imported
    import torch

    from rlhpc.checkpoint.manifest import FileEntry
    from rlhpc.cluster.placement import Placement
    from rlhpc.data.types import Completion, PackedBatch
    from rlhpc.train.protocols import LossSpec, SamplingSpec, ValueLossSpec

_INTERRUPT_KEY = "rlhpc/interrupt"  # in the store where the ranks met
_PATIENCE_S = 0.25  # between two looks at a stop, while ranks are waited for
_FAILURES_S = 2.0  # how long after a first failure those of other ranks are waited for


class RankWorker:
    """One rank of the world. Every method is collective: the driver calls it on all ranks at once."""

    def __init__(
        self,
        cfg: RunConfig,
        rank: int,
        world_size: int,
        device: str,
        master: tuple[str, int],
        log: str,
    ) -> None:
        self.cfg, self.rank, self.world_size = cfg, rank, world_size
        self._device, self._master, self._log = device, master, Path(log)
        self._usage = Usage()

    def start(self) -> None:
        """Joins the world and builds engine and trainer. Not done in the constructor, whose errors Ray reports as the
        death of an actor."""
        _redirect_output(self._log)
        attempt = Attempt.current(os.environ)
        when, whose = time.strftime("%Y-%m-%d %H:%M:%S"), f"attempt {attempt.name}, " if attempt else ""
        place = f"rank {self.rank} of {self.world_size} on {socket.gethostname()}, pid {os.getpid()}"
        print(f"=== {when} {whose}{place}", flush=True)
        cfg, threads = self.cfg, str(self.cfg.cluster.threads_per_rank)
        local_rank = self.rank % cfg.trainer.n_gpus_per_node
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(cfg.trainer.n_gpus_per_node),
            MASTER_ADDR=self._master[0],
            MASTER_PORT=str(self._master[1]),
            OMP_NUM_THREADS=threads,
            MKL_NUM_THREADS=threads,
        )
        begin = time.monotonic()
        self._join(self._device, local_rank)
        from rlhpc.train.builder import build_engine, build_trainer
        from rlhpc.train.rank_save import RankSaver

        hf_config = json.loads(Path(cfg.actor_rollout_ref.model.path, "config.json").read_text())
        ident = ident_of(os.environ[TOKEN_VARIABLE])  # of the session on this rank's node
        self.engine = build_engine(cfg, hf_config, self._device, self.rank, self.world_size, ident)
        self.engine.sleep()
        self._shared = shared_experts(cfg, hf_config, self.world_size)
        experts = self.engine.expert_weights()
        shared = {name: experts[of_engine] for name, of_engine in self._shared.items()}
        self.trainer = build_trainer(cfg, hf_config, self._device, shared)
        self._saver = RankSaver(
            self.rank,
            self.trainer,
            self._store.set,
            num_threads=max(1, min(8, len(os.sched_getaffinity(0)) // cfg.trainer.n_gpus_per_node)),
            reserve=cfg.checkpoint.async_save and cfg.trainer.save_freq > 0,
        )
        self._publishes = 0
        self._start_s = time.monotonic() - begin

    def _join(self, device: str, local_rank: int) -> None:
        """The one process group that trainer, engine and reshard share."""
        import datetime

        import torch
        import torch.distributed as dist

        torch.set_num_threads(self.cfg.cluster.threads_per_rank)
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        timeout = datetime.timedelta(seconds=self.cfg.cluster.collective_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        self._store = dist.TCPStore(*self._master, is_master=False)

    def describe(self) -> dict[str, Any]:
        """Where this rank stands in both grids. Raises where it couldn't report a save."""
        self._saver.check()
        return {
            "dp_rank": self.trainer.data_parallel_rank,
            "dp_size": self.trainer.data_parallel_size,
            "replica_rank": self.engine.replica_rank,
            "num_replicas": self.engine.num_replicas,
            "start_s": self._start_s,
        }

    def publish(self, policy_version: int) -> dict[str, float]:
        """Moves the trainer's weights into the engine; afterwards the engine is awake and the trainer asleep."""
        part = self._usage.part
        with part("offload"):
            self.trainer.begin_sleep()
        with part("engine"):
            self.engine.wake("weights")
        with part("sync"):
            self._reshard()  # holds on to no buffer: the engine may free its own before the KV cache takes memory
            self.engine.end_publish(policy_version)
        with part("offload"):
            self.trainer.sleep()
        with part("engine"):
            self.engine.wake("kv_cache")
        return {"received_bytes": float(self._resharder.received_bytes)}

    def _reshard(self) -> None:
        from rlhpc.reshard.execute import Resharder
        from rlhpc.reshard.in_place import without
        from rlhpc.reshard.plan import plan
        from rlhpc.reshard.verify import verify

        sink_buffers = self.engine.begin_publish()
        if self._publishes == 0:
            wanted = without(self.engine.sink_specs(), self._shared.values())
            self._plan = plan(self.trainer.source_specs(), wanted)
            self._resharder = Resharder(self._plan, self.rank, group=None, bucket_bytes=self.cfg.reshard.bucket_bytes)
        source_buffers = self.trainer.source_buffers()
        self._resharder.run(source_buffers, sink_buffers)
        every = self.cfg.reshard.verify_every
        if every and self._publishes % every == 0:
            verify(self._plan, source_buffers, sink_buffers, self.rank, group=None)
        self._publishes += 1

    def generate(
        self, prompts: Sequence[tuple[int, Sequence[int]]], sampling: SamplingSpec, seed: int
    ) -> list[Completion]:
        """Completions of this replica's prompts, from its first rank alone: the others hold the same."""
        completions, _ = self.engine.generate(prompts, sampling, seed=seed, interrupted=self._interrupted)
        first = self.rank % (self.world_size // self.engine.num_replicas) == 0
        return completions if first else []

    def _interrupted(self) -> bool:
        return bool(self._store.check([_INTERRUPT_KEY]))

    def begin_update(self) -> None:
        """Hands the device from the engine to the trainer."""
        with self._usage.part("engine"):
            self.engine.sleep()
        with self._usage.part("offload"):
            self.trainer.wake()

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float, model: str) -> list[torch.Tensor]:
        return [values.cpu() for values in self.trainer.logprobs(batches, temperature=temperature, model=model)]

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        return [values.cpu() for values in self.trainer.values(batches)]

    def step(self, batches: Sequence[PackedBatch], loss: LossSpec | ValueLossSpec) -> dict[str, float]:
        self._saver.before_change()
        return self.trainer.step(batches, loss)

    def save(self, directory: str, read_back: bool) -> list[FileEntry]:
        """Writes this rank's part of a pending checkpoint."""
        return self._saver.write(Path(directory), read_back=read_back)

    def begin_save(self, directory: str, save_id: str, read_back: bool) -> None:
        """Has a thread write this rank's state, which reports in the store where the ranks met."""
        self._saver.begin(Path(directory), save_id, read_back=read_back)

    def load(self, directory: str) -> None:
        self.trainer.load_checkpoint(Path(directory))

    def load_weights(self, source: str) -> None:
        self.trainer.load_weights(Path(source))

    def save_hf(self, directory: str) -> None:
        self.trainer.save_hf(Path(directory))

    def usage(self) -> dict[str, float]:
        """Seconds and memory of this rank by phase since the last call; see usage.py."""
        return self._usage.take()

    def answer(self, phase: str, method: str, *arguments: Any, **common: Any) -> Any:
        """Runs a method for the driver, which is in `phase` of a step or, empty, in none. What it raises goes to the
        rank's log in full: the driver says it in a line."""
        with ExitStack() as stack:
            stack.push(_print_error)
            stack.enter_context(self._usage.phase(phase))
            return getattr(self, method)(*arguments, **common)


def _print_error(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        with suppress(OSError):  # on a full disk the driver has to hear of the error, not of the log
            traceback.print_exception(kind, error, trace)


def _redirect_output(log: Path) -> None:
    """Everything that libraries print goes to the rank's own file, also what C++ prints: one file over all attempts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


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
            self._open_store().set(_INTERRUPT_KEY, "1")

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
        import datetime

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

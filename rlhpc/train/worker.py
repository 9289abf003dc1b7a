"""One rank: a Megatron rank and its in-process vLLM rank in one process, whoever calls it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.limits import free_memory
from rlhpc.cluster.session import TOKEN_VARIABLE, ident_of
from rlhpc.config.in_place import shared_experts
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.train.usage import Usage

if TYPE_CHECKING:  # a worker sets its environment before torch is first imported
    import numpy as np
    import torch

    from rlhpc.checkpoint.manifest import FileEntry
    from rlhpc.data.types import Completion, PackedBatch
    from rlhpc.train.protocols import LossSpec, SamplingSpec, ValueLossSpec

INTERRUPT_KEY = "rlhpc/interrupt"  # in the store where the ranks met


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
        in_background = cfg.checkpoint.async_save and cfg.trainer.save_freq > 0
        self._require_host_memory(copies=in_background)
        self._saver = RankSaver(
            self.rank,
            self.trainer,
            self._store.set,
            num_threads=max(1, min(8, len(os.sched_getaffinity(0)) // cfg.trainer.n_gpus_per_node)),
            reserve=in_background,
        )
        self._publishes = 0
        self._start_s = time.monotonic() - begin

    def _require_host_memory(self, *, copies: bool) -> None:
        """Before any rank takes its part. Raises ConfigError on all ranks where a node has too little for its own."""
        import torch.distributed as dist

        from rlhpc.checkpoint.snapshot import copy_bytes
        from rlhpc.memory.host import HostNeed, too_little_free

        of_copies = copy_bytes(tensor for _, tensor in self.trainer.state_pieces().pieces) if copies else 0
        need = HostNeed(socket.gethostname(), self.trainer.host_bytes, of_copies, free_memory())
        needs: list[Any] = [None] * self.world_size
        dist.all_gather_object(needs, need)
        if problem := too_little_free(needs):
            raise ConfigError(problem)

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
        return bool(self._store.check([INTERRUPT_KEY]))

    def begin_update(self) -> None:
        """Hands the device from the engine to the trainer."""
        with self._usage.part("engine"):
            self.engine.sleep()
        with self._usage.part("offload"):
            self.trainer.wake()

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float, model: str) -> list[torch.Tensor]:
        return [values.cpu() for values in self.trainer.logprobs(batches, temperature=temperature, model=model)]

    def routed_logprobs(
        self, batches: Sequence[PackedBatch], temperature: float
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        found, experts = self.trainer.routed_logprobs(batches, temperature=temperature)
        return [values.cpu() for values in found], experts

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

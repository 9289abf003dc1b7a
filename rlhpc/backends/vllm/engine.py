"""The rollout engine: vLLM inside the rank's own process, its weights always those that were published."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.backends.vllm import private
from rlhpc.backends.vllm.rng import isolated_rng
from rlhpc.backends.vllm.routing import Routing, chosen_experts
from rlhpc.backends.vllm.samples import Samples
from rlhpc.backends.vllm.sampling import (
    Prompts,
    check_prompts,
    completions,
    request_params,
    request_seeds,
    token_digest,
)
from rlhpc.backends.vllm.shm import cleanup_shm
from rlhpc.backends.vllm.sinks import DirectSink, ReferenceSink, whole_tensors
from rlhpc.config.model_dir import eos_token_ids
from rlhpc.config.model_fit import engine_problems
from rlhpc.config.schema import RunConfig
from rlhpc.data.types import Completion
from rlhpc.errors import EngineError, raise_problems
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for
from rlhpc.reshard.in_place import expert_buffers
from rlhpc.train.protocols import SamplingSpec, WeightSink

logger = logging.getLogger(__name__)

INTERRUPTIBLE_BATCHES = 32  # under a second of decoding
# After the start, the first generation and the first update, which compiles. What lives then, a million objects of
# vLLM, torch and Megatron, lives on; to look through it for garbage again takes 0.4 s of every later sleep.
LONG_LIVED_SLEEPS = 3


def cudagraph_capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decoding that get a CUDA graph: vLLM's own choice, which ends at 512 (0.24, config/vllm.py), and
    every 64th beyond, so that `max_num_seqs` sequences at once aren't decoded kernel by kernel."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(576, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def engine_arguments(cfg: RunConfig, model_dir: Path, device: str, *, latent: bool = False) -> dict[str, Any]:
    """What `vllm.LLM` is created with. Random ("dummy") weights stand until the first publish, whose tensors aren't
    quantised even where the model directory's are. `latent`: the model has latent attention."""
    rollout = cfg.actor_rollout_ref.rollout
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "load_format": "dummy",
        "hf_overrides": {"quantization_config": None},
        "skip_tokenizer_init": not rollout.stop,  # only stop strings need text
        "trust_remote_code": cfg.actor_rollout_ref.model.trust_remote_code,
        "dtype": cfg.actor_rollout_ref.model.dtype,
        "seed": cfg.seed % 2**32,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": rollout.max_model_len or cfg.data.max_prompt_length + cfg.data.max_response_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if device == "cuda":
        return arguments | {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enforce_eager": rollout.enforce_eager,
            "compilation_config": {
                "cudagraph_capture_sizes": rollout.cudagraph_capture_sizes
                or cudagraph_capture_sizes(rollout.max_num_seqs)
            },
            "async_scheduling": True,  # the next batch is prepared while the device works on this one
            "enable_sleep_mode": rollout.free_cache_engine,
            "moe_backend": "triton",  # others reorder the experts' weights, which a publish writes in place
        }
    if latent:
        arguments |= {
            "attention_config": {"backend": "CPU_MLA"},  # AMX's, which vLLM 0.32 prefers, is for bfloat16 alone
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # that kernel rotates but one of the heads
        }
    return arguments | {
        "kv_cache_memory_bytes": int(rollout.cpu_kv_cache_gib * 2**30),
        "enforce_eager": True,
    }


class VllmEngine:
    """One rank of a vLLM replica (implements `rlhpc.train.protocols.RolloutEngine`).

    Replicas are groups of `rollout.tensor_model_parallel_size` consecutive ranks of the running
    torch.distributed world. `generate` and `close` are collective within a replica, constructing in the whole world.
    `ident` begins the names of the engine's shared memory; it must be this job's own on the node.

    Raises ConfigError (sizes that don't fit), ModelError (unsupported model), EngineError (unsupported vLLM).
    """

    def __init__(
        self,
        cfg: RunConfig,
        hf_config: dict[str, Any],
        model_dir: Path,
        device: str,
        rank: int,
        world_size: int,
        ident: str,
    ) -> None:
        private.check_version()
        rollout, model = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
        family, tp = family_for(hf_config), rollout.tensor_model_parallel_size
        facts = family.model_facts(hf_config)
        raise_problems(engine_problems(cfg, facts, world_size, device))
        self._in_place, expert_parallel = cfg.reshard.in_place_experts, rollout.expert_parallel_size > 1
        specs = family.rollout_specs(hf_config, tp, range(world_size), model.dtype, expert_parallel=expert_parallel)
        self._vocab_size = facts.vocab_size
        self._chosen = chosen_experts(facts) if rollout.enable_rollout_routing_replay else None
        self._eos = eos_token_ids(Path(model_dir), hf_config)
        self._device, self._rank, self._tp, self._ident = device, rank, tp, ident
        self._num_replicas = world_size // tp
        arguments = engine_arguments(cfg, Path(model_dir), device, latent=facts.latent is not None)
        self._max_model_len: int = arguments["max_model_len"]
        self._has_tokenizer = not arguments["skip_tokenizer_init"]
        self._can_sleep = device == "cuda" and rollout.free_cache_engine
        self._asleep: set[str] = set()
        self._num_sleeps = 0
        self._llm = self._launch(arguments, cfg.seed)
        if cfg.reshard.sink == "reference":
            whole = whole_tensors(family.canonical_tensors(hf_config), model.dtype, world_size)
            self._sink: WeightSink = ReferenceSink(self._llm, whole)
        else:
            self._sink = DirectSink(self._llm, specs, rank)

    def _launch(self, arguments: dict[str, Any], seed: int) -> private.LLM:
        cleanup_shm(self._ident)
        dist.barrier()  # nobody creates a segment before everybody has removed the old ones
        stay = private.weights_stay() if self._in_place else nullcontext()
        told = self._chosen.of_new_engine() if self._chosen else nullcontext()
        with isolated_rng(seed, self._device), private.launching(self._ident), stay, told, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            llm = private.LLM(**arguments)
        dist.barrier()  # everybody has attached: from here a segment needs no name, and no kill can leave one
        cleanup_shm(self._ident)
        return llm

    @property
    def replica_rank(self) -> int:
        return self._rank // self._tp

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingSpec,
        *,
        seed: int,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Completion], int]:
        """Samples n completions of each (prompt_id, token_ids); prompt-major, then by sample index.

        A completion depends on the weights, its prompt, the sampling and `seed` alone: the request's seed is
        hash64(seed, prompt_id, sample_idx), and no cache outlives a call. `interrupted` is asked every
        INTERRUPTIBLE_BATCHES engine steps: once it says so on any rank of the replica, all return no completions, and
        the engine must not generate again. With `sampling.routing` the first rank's completions have their experts.
        Raises EngineError, on all ranks of the replica, for prompts that don't fit and when ranks disagree.
        """
        if self._asleep:
            raise EngineError(f"generate while {sorted(self._asleep)} sleep; call wake first")
        if sampling.stop and not self._has_tokenizer:
            raise EngineError(
                f"stop={list(sampling.stop)} needs the tokenizer; set actor_rollout_ref.rollout.stop as well"
            )
        check_prompts(prompts, sampling, self._max_model_len, self._vocab_size)
        params = request_params(prompts, sampling, self._eos)
        requests = [
            {"prompt_token_ids": tokens}
            for tokens in ([int(token) for token in token_ids] for _, token_ids in prompts)
            for _ in range(sampling.n)
        ]
        batch = private.Batch(self._llm)
        samples, routing = Samples(batch, request_seeds(prompts, sampling.n, seed)), self._routing(batch, sampling)
        self._llm.reset_prefix_cache()
        record = _asking(interrupted, [samples.record, *([routing.record] if routing else [])])
        try:
            with (
                isolated_rng(seed, self._device),
                self._compiler(),
                private.sampling(self._llm, samples.draw, record),
            ):
                outputs = self._llm.generate(requests, params, use_tqdm=False)
        except _Interrupted:
            return [], 0
        answers = completions(outputs, samples.by_request(), prompts, sampling.n)
        digest = token_digest(answers)
        require_agreement(digest, private.tensor_parallel_group())
        return routing.added_to(answers, prompts) if routing else answers, digest

    def _routing(self, batch: private.Batch, sampling: SamplingSpec) -> Routing | None:
        if not sampling.routing:
            return None
        if self._chosen is None:
            raise EngineError("routing needs actor_rollout_ref.rollout.enable_rollout_routing_replay=true")
        self._chosen.watch(self._llm)
        return Routing(batch, self._chosen) if self._rank % self._tp == 0 else None

    def _compiler(self) -> AbstractContextManager[Any]:
        """On CPU vLLM compiles a few small functions even when eager: 7 to 25 s of a start, for nothing."""
        return nullcontext() if self._device == "cuda" else torch.compiler.set_stance("force_eager")

    def sink_specs(self) -> Sequence[ShardSpec]:
        return self._sink.sink_specs()

    def expert_weights(self) -> Mapping[str, torch.Tensor]:
        """With reshard.in_place_experts: the running model's experts on this rank, by the names that `sink_specs` use.
        They stay where they are for good; whoever else uses them must change them while the engine sleeps alone."""
        experts = expert_buffers(self.sink_specs()) if self._in_place else set()
        parameters = private.running_model(self._llm).named_parameters()
        return {name: parameter.data for name, parameter in parameters if name in experts}

    def begin_publish(self) -> Mapping[str, torch.Tensor]:
        """The sink's buffers on this rank, by the names that `sink_specs` use."""
        if "weights" in self._asleep:
            raise EngineError("begin_publish while the weights sleep; call wake('weights') first")
        return self._sink.begin_publish()

    def end_publish(self, policy_version: int) -> None:
        """Makes the written weights the ones that generate; prefixes computed with the old are dropped."""
        with self._compiler():
            self._sink.end_publish(policy_version)
        if self._device == "cpu":
            _free_replaced_weights()
        self._llm.reset_prefix_cache()
        logger.debug("policy version %d published", policy_version)

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache (vLLM's level 2), of the latter alone with
        reshard.in_place_experts; on CPU, which can't, does nothing."""
        if not self._can_sleep:
            _say_once_that_it_stays_awake(self._device)
        elif not self._asleep:
            self._llm.sleep(level=2)  # collects garbage at its end
            self._num_sleeps += 1
            if self._num_sleeps <= LONG_LIVED_SLEEPS:
                gc.freeze()
            self._asleep = {"weights", "kv_cache"}

    def wake(self, what: str) -> None:
        """Takes memory again, contents undefined: `what` is "weights" (publish next) or "kv_cache"."""
        if what not in ("weights", "kv_cache"):
            raise ValueError(f"what={what!r}; choose 'weights' or 'kv_cache'")
        if what in self._asleep:
            self._llm.wake_up(tags=[what])
            self._asleep.discard(what)

    def close(self) -> None:
        """Ends the engine and removes its shared memory; the torch.distributed world stays. Safe to repeat."""
        if hasattr(self, "_llm"):
            private.shut_down(self._llm)
            del self._llm, self._sink
            gc.collect()
        cleanup_shm(self._ident)


class _Interrupted(BaseException):
    """Leaves vLLM's loop from within; for an Exception it would dump its state as at a crash."""


def _asking(
    interrupted: Callable[[], bool], records: Sequence[Callable[[torch.Tensor, torch.Tensor], None]]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """All `records`, then whether to go on; the ranks of a replica, which step together, leave together."""
    numbers = itertools.count(1)

    def recorded(tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        for record in records:
            record(tokens, logprobs)
        if next(numbers) % INTERRUPTIBLE_BATCHES == 0:
            flag = torch.tensor([interrupted()], dtype=torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=private.tensor_parallel_group())
            if flag:
                raise _Interrupted

    return recorded


def require_agreement(digest: int, group: dist.ProcessGroup) -> None:
    """Raises EngineError on every rank of `group` unless all hold the same digest."""
    mine = torch.tensor([digest], dtype=torch.int64)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    values = [int(value) for value in digests]
    if len(set(values)) > 1:
        raise EngineError(
            "the tensor-parallel ranks of a replica sampled different tokens, digests "
            f"{', '.join(f'{value:016x}' for value in values)}: every rank must generate with the "
            "same prompts, sampling, seed and weights"
        )


def _free_replaced_weights() -> None:
    """Modules that refer to each other hold them until a collection, and glibc's malloc keeps their pages: together
    more than a model's size on every rank."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@cache
def _say_once_that_it_stays_awake(device: str) -> None:
    reason = "vLLM has no sleep mode on CPU" if device != "cuda" else "rollout.free_cache_engine is off"
    logger.info("the rollout engine keeps its memory between rollouts: %s", reason)

"""What the ranks of test_vllm.py run: real engines on gloo, weights written from Hugging Face files."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.config.schema import RunConfig
from rlhpc.data.types import Completion
from rlhpc.errors import EngineError
from rlhpc.reshard.hf import load_hf
from rlhpc.train.protocols import SamplingSpec
from tests.hf_files import read_tensors

Prompts = Sequence[tuple[int, Sequence[int]]]


def run_config(world_size: int, tp: int, **rollout: Any) -> RunConfig:
    cfg = RunConfig()
    cfg.data.max_prompt_length, cfg.data.max_response_length = 192, 64
    cfg.actor_rollout_ref.model.dtype = "float32"
    options = {"tensor_model_parallel_size": tp, "max_num_seqs": 256, "cpu_kv_cache_gib": 0.1} | rollout
    for name, value in options.items():
        setattr(cfg.actor_rollout_ref.rollout, name, value)
    cfg.trainer.n_gpus_per_node = world_size
    return cfg


def spec(**changes: Any) -> SamplingSpec:
    return SamplingSpec(
        **{
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_response_length": 16,
            "ignore_eos": True,
        }
        | changes
    )


def new_engine(
    model_dir: str,
    tp: int,
    ident: str,
    sink: str = "direct",
    device: str = "cpu",
    dtype: str = "float32",
    **rollout: Any,
) -> Any:
    from rlhpc.backends.vllm.engine import VllmEngine

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    hf_config = json.loads(Path(model_dir, "config.json").read_text())
    cfg = run_config(world_size, tp, **rollout)
    cfg.reshard.sink, cfg.actor_rollout_ref.model.dtype = sink, dtype
    return VllmEngine(cfg, hf_config, Path(model_dir), device, rank, world_size, ident)


@contextmanager
def engine(model_dir: str, tp: int, ident: str, **options: Any) -> Iterator[Any]:
    running = new_engine(model_dir, tp, ident, **options)
    try:
        yield running
    finally:
        running.close()


def publish(running: Any, model_dir: str) -> None:
    buffers = running.begin_publish()
    load_hf(Path(model_dir), running.sink_specs(), int(os.environ["RANK"]), buffers)
    running.end_publish(1)


def raw_generate(running: Any, prompts: Prompts, num_tokens: int = 8) -> list[dict[str, Any]]:
    """Samples straight from vLLM, whose prefix cache then stays as it is."""
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=7 + i)
        for i in range(len(prompts))
    ]
    outputs = running._llm.generate([{"prompt_token_ids": ids} for _, ids in prompts], params, use_tqdm=False)
    return [
        {
            "prompt": ids,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [next(iter(at.values())).logprob for at in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for (_, ids), output in zip(prompts, outputs, strict=True)
    ]


def change_weights(running: Any, model_dir: str, how: str) -> None:
    if how == "publish":
        publish(running, model_dir)
    else:
        weights = list(read_tensors(model_dir).items())
        running._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def refit(old: str, new: str, how: str, prompts: Prompts) -> dict[str, Any]:
    """Generates with the old weights twice, changes them all, and generates again."""
    with engine(old, 2, "rlhpcrefit") as running:
        publish(running, old)
        raw_generate(running, prompts)
        samples = {"old": raw_generate(running, prompts)}
        change_weights(running, new, how)
        samples["new"] = raw_generate(running, prompts)
        return samples


def scramble_generators(rank: int) -> None:
    """Leaves every global generator of this process in a state that no other rank is in."""
    torch.manual_seed(1000 + rank)
    torch.rand(17 * (rank + 1))
    np.random.seed(2000 + rank)
    np.random.rand(5 * (rank + 1))
    random.seed(3000 + rank)


def generator_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except EngineError as error:
        return str(error)
    return ""


def rollout(model_dir: str, prompts: Prompts, specs: dict[str, SamplingSpec]) -> dict[str, Any]:
    """One engine through everything that `generate` promises; test_vllm.py judges what comes back."""
    rank = int(os.environ["RANK"])
    with engine(model_dir, 2, "rlhpcrollout", enable_rollout_routing_replay=True) as running:
        result: dict[str, Any] = {"buffers": {k: tuple(v.shape) for k, v in running.begin_publish().items()}}
        running.end_publish(0)
        publish(running, model_dir)
        scramble_generators(rank)
        before = generator_states()
        result["samples"] = {name: running.generate(prompts, spec, seed=11) for name, spec in specs.items()}
        result["restored"] = generator_states() == before
        scramble_generators(rank + 5)
        result["again"] = running.generate(prompts, specs["plain"], seed=11)[1]
        result["other_seed"] = running.generate(prompts, specs["plain"], seed=12)[1]
        one = prompts[:1]
        result["alone"] = running.generate(one, specs["plain"], seed=11)[0]
        crowd = [(1000 + i, prompts[-1][1][i:] + prompts[-1][1][:i]) for i in range(70)]  # over 8,192 tokens of prompts
        result["crowded"] = running.generate([*crowd, *one], specs["plain"], seed=11)[0][
            len(crowd) * specs["plain"].n :
        ]
        result["many"] = running.generate(one, spec(n=4000, max_response_length=1), seed=5)[0]
        result["errors"] = {
            "ranks apart": error_of(lambda: running.generate(prompts, specs["plain"], seed=rank)),
            "too long": error_of(lambda: running.generate([(41, [3] * 241)], specs["plain"], seed=1)),
            "empty": error_of(lambda: running.generate([(42, [])], specs["plain"], seed=1)),
            "vocabulary": error_of(lambda: running.generate([(43, [3, 320])], specs["plain"], seed=1)),
            "stop": error_of(lambda: running.generate(prompts, spec(stop=("a",)), seed=1)),
        }
        result["after_errors"] = running.generate(prompts, specs["plain"], seed=11)[1]
        running.sleep()
        running.wake("weights")
        running.wake("kv_cache")
        result["after_sleep"] = running.generate(prompts, specs["plain"], seed=11)[1]
        objects = []
        for _ in range(6):
            publish(running, model_dir)  # collects the replaced modules itself
            objects.append(sum(isinstance(item, torch.nn.Module) for item in gc.get_objects()))
        result["modules"] = objects
        return result


def recorded(model_dir: str, device: str, dtype: str, num_blocks: int | None, **rollout: Any) -> dict[str, Any]:
    """An engine answers prompts of mixed length by mixed sampling, its tokens drawn by vLLM and by `Samples`: what was
    recorded, what vLLM returned through `logprobs=0`, and what every token was drawn from. With few `num_blocks` of KV
    cache it must preempt; a request that leaves the batch and comes back was."""
    from vllm import SamplingParams

    from rlhpc.backends.vllm import private
    from rlhpc.backends.vllm.engine import engine_arguments
    from rlhpc.backends.vllm.routing import Routing, chosen_experts
    from rlhpc.backends.vllm.samples import Samples, split_by_request
    from rlhpc.reshard.families import model_facts

    class Watched(Samples):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.distributions: list[torch.Tensor] = []

        def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
            super().record(tokens, logprobs)
            self.distributions.append(logprobs.clone())

    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    torch.set_num_threads(1)
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # else Triton's float32 products are TF32
    cfg = run_config(1, 1, **rollout)
    cfg.actor_rollout_ref.model.dtype = dtype
    # The model's own weights: under vLLM's dummies all tokens are equally likely, and answers depend on the seed alone.
    arguments = engine_arguments(cfg, Path(model_dir), device)
    arguments |= {"num_gpu_blocks_override": num_blocks, "load_format": "auto"}
    chosen = chosen_experts(model_facts(json.loads(Path(model_dir, "config.json").read_text())))
    with private.launching(f"rlhpcrecorded{os.getpid()}"), chosen.of_new_engine():
        llm = private.LLM(**arguments)
    chosen.watch(llm)
    rng = np.random.default_rng(0)
    lengths = (40, 70, 100, 110, 120, 125, 60, 90, 115, 119, 123, 127)
    prompts = [{"prompt_token_ids": rng.integers(5, 90, length).tolist()} for length in lengths]
    ways = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 9, "temperature": 1.4})
    params = [
        SamplingParams(max_tokens=61, logprobs=0, flat_logprobs=True, detokenize=False, extra_args={private.ROW: row},
                       stop_token_ids=[7], **ways[row % len(ways)])
        for row in range(len(prompts))
    ]  # fmt: skip
    seeds = np.arange(len(prompts)) * 7**20
    result: dict[str, Any] = {}
    for name in ("vllm's draws", "ours", "again"):
        samples, routing = Watched(private.Batch(llm), seeds), Routing(private.Batch(llm), chosen, bytes_on_device=9000)
        record = both(samples.record, routing.record)
        llm.reset_prefix_cache()
        with private.sampling(llm, None if name == "vllm's draws" else samples.draw, record):
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        answers = [
            Completion(row, 0, np.array(output.token_ids, np.int32), np.zeros(0, np.float32), "length")
            for row, output in enumerate(outputs)
        ]
        asked = [(row, prompt["prompt_token_ids"]) for row, prompt in enumerate(prompts)]
        batches = [set(rows.tolist()) for rows in samples._rows]
        seen = [[row in batch for batch in batches] for row in range(len(prompts))]
        rows, positions = np.concatenate(samples._rows), np.concatenate(samples._positions)
        distributions = torch.cat(samples.distributions)
        greedy = torch.tensor([param.temperature == 0 for param in params])[rows].to(distributions.device)
        drawn = redrawn(distributions, seeds[rows], positions)
        result[name] = {
            "tokens": [list(output.token_ids) for output in outputs],
            "logprobs": [list(output.logprobs.logprobs) for output in outputs],
            "recorded": samples.by_request(),
            "prompts": asked,
            "experts": [answer.experts for answer in routing.added_to(answers, asked)],
            "preempted": sum(np.diff(np.flatnonzero(batch)).max(initial=1) > 1 for batch in seen),
            "batches": len(batches),
        } | {
            key: split_by_request(rows, positions, values, len(prompts))
            for key, values in {
                "positions": positions,
                "distributions": distributions.cpu().numpy(),
                "redrawn": torch.where(greedy, distributions.argmax(-1), drawn).cpu().numpy(),
            }.items()
        }
    private.shut_down(llm)
    return result


def both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def called(*arguments: Any) -> None:
        first(*arguments)
        second(*arguments)

    return called


def redrawn(distributions: torch.Tensor, seeds: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """A token from every row of logprobs [N, V], all at once, as `Samples` promises it for its seed and position."""
    from rlhpc.backends.vllm.private import gumbel_argmax
    from rlhpc.backends.vllm.samples import mix64

    return gumbel_argmax(distributions, torch.from_numpy(mix64(seeds, positions)).to(distributions.device))


def kept(model_dir: str, temp_root: str) -> dict[str, int]:
    """Builds an engine as a rank does and compiles a function. The files below `temp_root` afterwards and when each was
    written, nanoseconds; not locks, which every start writes."""
    from rlhpc.train.builder import build_engine

    dist.init_process_group("gloo")
    cfg = run_config(1, 1)
    cfg.actor_rollout_ref.model.path, cfg.cluster.ray_temp_root = model_dir, temp_root
    hf_config = json.loads(Path(model_dir, "config.json").read_text())
    build_engine(cfg, hf_config, "cpu", 0, 1, f"rlhpckept{os.getpid()}").close()
    torch.compile(lambda x: (x + 1).sin())(torch.ones(3))
    root = Path(temp_root)
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in files}


def stop_strings(model_dir: str, prompts: Prompts, stop: str) -> list[Completion]:
    with engine(model_dir, 1, "rlhpcstop", stop=[stop]) as running:
        publish(running, model_dir)
        return running.generate(prompts, spec(stop=(stop,), n=4, max_response_length=32), seed=3)[0]


def segments(ident: str) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").iterdir() if ident in path.name or "psm_" in path.name)


def crash_while_starting(model_dir: str, ident: str) -> None:
    """Dies where a start is most exposed: segments created, their names not yet removed."""
    from rlhpc.backends.vllm import engine as module
    from rlhpc.backends.vllm import private

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with private.launching(ident):
        llm = private.LLM(**module.engine_arguments(run_config(2, 2), Path(model_dir), "cpu"))
    dist.barrier()
    assert private.running_model(llm) is not None  # alive until the kill
    os.kill(os.getpid(), signal.SIGKILL)


def replicas(model_dir: str, ident: str, prompts: Prompts, kill: bool) -> dict[str, Any]:
    """Two replicas of two ranks, each with its own prompts, after a crash; dies by SIGKILL at the end if asked to."""
    left_by_crash = segments(ident)
    running = new_engine(model_dir, 2, ident)
    publish(running, model_dir)
    while_running = segments(ident)
    mine = prompts[running.replica_rank :: running.num_replicas]
    samples, digest = running.generate(mine, spec(n=2), seed=11)
    dist.barrier()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    running.close()
    running.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the world outlives the engine
    return {
        "left_by_crash": left_by_crash,
        "while_running": while_running,
        "after_close": segments(ident),
        "replica": (running.replica_rank, running.num_replicas),
        "samples": samples,
        "digest": digest,
        "world": int(total),
    }

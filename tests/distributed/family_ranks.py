"""What each rank does in test_families.py: one start of Megatron and vLLM for every family in turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rlhpc.data.packing import TokenSequence, pack, split_by_sequence
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.plan import plan
from rlhpc.reshard.verify import verify
from tests.distributed.checkpoint_ranks import save
from tests.distributed.megatron_ranks import VOCAB, forget_groups, make_trainer, one_step, train
from tests.distributed.vllm_ranks import engine, spec

PROMPT_LENGTHS = (1, 7, 40, 90)
BIAS_RATE = 0.01


@dataclass(frozen=True)
class Case:
    """A model directory, how the ranks train it, how many of them hold one rollout replica, and where both compute."""

    model_dir: Path
    sizes: Mapping[str, int]
    rollout_tp: int
    device: str = "cpu"
    dtype: str = "float32"
    rollout: Mapping[str, Any] = field(default_factory=dict)


def steps(calls: Mapping[str, tuple[Path, Mapping[str, int]]]) -> dict[str, dict[str, Any]]:
    """One optimizer step of each model under each layout, where biases move with recomputation and filler."""
    outcomes = {}
    for name, (model_dir, sizes) in calls.items():
        given = balanced(model_dir)
        sparing = {"max_sequences": 1, "model__enable_gradient_checkpointing": True} if given else {}
        outcomes[name] = one_step(model_dir, sizes, max_tokens=40, **given, **sparing)
        forget_groups()
    return outcomes


def balanced(model_dir: Path) -> dict[str, Any]:
    """Moves the correction biases of a model that has them."""
    sigmoid = json.loads((model_dir / "config.json").read_text())["model_type"] == "deepseek_v3"
    return {"actor__megatron__moe_router_bias_update_rate": BIAS_RATE} if sigmoid else {}


def all_cases(cases: Mapping[str, Case], out_dir: Path) -> dict[str, dict[str, Any]]:
    return {name: _case(name, case, out_dir) for name, case in cases.items()}


def _case(name: str, case: Case, out_dir: Path) -> dict[str, Any]:
    """One optimizer step from the file's weights. Then from them again: export, publish, sample; two steps of
    training; checkpoint, export, publish, sample."""
    where: dict[str, Any] = {"device": case.device, "model__dtype": case.dtype, **balanced(case.model_dir)}
    outcome: dict[str, Any] = {"step": one_step(case.model_dir, case.sizes, max_tokens=40, **where)}
    forget_groups()
    trainer = make_trainer(case.model_dir, case.sizes, **where)
    options = {"device": case.device, "dtype": case.dtype, **case.rollout}
    with engine(str(case.model_dir), case.rollout_tp, f"rlhpc{name}", **options) as running:
        copies = plan(trainer.source_specs(), running.sink_specs())
        resharder = Resharder(copies, dist.get_rank(), None, 1 << 20)
        for version, stage in enumerate(("loaded", "trained")):
            if stage == "trained":
                list(train(trainer, range(2)))
                save(trainer, out_dir / name / "run/checkpoints")
            trainer.save_hf(out_dir / name / stage)
            source, sink = trainer.source_buffers(), running.begin_publish()
            resharder.run(source, sink)
            verify(copies, source, sink, dist.get_rank())
            running.end_publish(version)
            outcome[stage] = _sampled(trainer, running)
    forget_groups()
    return outcome


def _sampled(trainer: Any, running: Any) -> list[dict[str, Any]]:
    """Completions of this rank's replica with the engine's logprobs and the trainer's."""
    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, VOCAB, length).tolist()) for i, length in enumerate(PROMPT_LENGTHS)]
    answers, _ = running.generate(prompts, spec(n=2), seed=3)
    sequences = [
        TokenSequence(i, np.array([*prompts[a.prompt_id][1], *a.token_ids], np.int32), len(prompts[a.prompt_id][1]), {})
        for i, a in enumerate(answers)
    ]
    trained = _trainer_logprobs(trainer, sequences)
    return [
        {
            "tokens": sequence.token_ids,
            "prompt_len": sequence.prompt_len,
            "engine": answer.logprobs,
            "trainer": trained[sequence.sequence_id],
        }
        for sequence, answer in zip(sequences, answers, strict=True)
    ]


def _trainer_logprobs(trainer: Any, sequences: Sequence[TokenSequence]) -> dict[int, np.ndarray]:
    """Of all sequences on all ranks: every rank's replica sampled the same, prompts and seed being the same."""
    batches = pack(sequences, dp_size=trainer.data_parallel_size, max_tokens=400)[trainer.data_parallel_rank]
    values = trainer.logprobs(batches, temperature=1.0, model="policy")
    mine: dict[int, np.ndarray] = {}
    for batch, value in zip(batches, values, strict=True):
        mine |= {i: row.cpu().numpy() for i, row in split_by_sequence(value, batch).items()}
    parts: list[dict[int, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {i: row for part in parts for i, row in part.items()}

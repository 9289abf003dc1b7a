"""TRL's GRPO on the shared model and prompts, with vLLM in its process: seconds of each phase, tokens, logprob gap.

usage: python scripts/bench/peers/grpo_trl.py INPUTS OUT.jsonl [--steps 5] [--dtype float32] [--model-impl vllm]
           [--check-engine]

Needs TRL 1.16 with its vLLM extra, and nothing of rlhpc. One row per rollout, under the names that rlhpc and verl use:
`gen`, `old_log_prob`, `reward` and `update_weights` are timed around TRL's own methods, the device synchronised at both
ends; `update_actor` is what is left of `step`, so everything else that TRL does counts there. `--dtype float32` is
TRL's way to masters (autocast to bfloat16; experts stay float32), `--dtype bfloat16` trains the weights without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
from reward import trl_scores

ANSWERS, OPTIMIZER_STEPS = 8, 2  # per prompt, and per rollout


class Clock:
    """Seconds by phase since the last lap."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._begin = self.now()

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.now()
        yield
        self._seconds[name] += self.now() - begin

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def lap(self) -> dict[str, float]:
        now = self.now()
        phases = dict(self._seconds)
        step = now - self._begin
        self._seconds.clear()
        self._begin = now
        seconds = phases | {"update_actor": step - sum(phases.values()), "step": step}
        return {f"timing_s/{name}": value for name, value in seconds.items()}


class TimedGRPO(GRPOTrainer):
    """TRL's trainer with a clock around the methods that make up a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock, self.num_tokens = Clock(), 0
        if self.use_vllm:
            engine = self.vllm_generation
            engine.sync_weights = self.clock.timed("update_weights", engine.sync_weights)
            engine.generate = self.clock.timed("gen", engine.generate)
        else:
            self._generate_single_turn = self.clock.timed("gen", self._generate_single_turn)
        self._calculate_rewards = self.clock.timed("reward", self._calculate_rewards)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.clock.phase("old_log_prob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.num_tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        return batch


class Rows(TrainerCallback):
    """Writes a row after the last optimizer step on each rollout."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._logged: dict[str, Any] = {}
        self.trainer: TimedGRPO | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer.clock.lap()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self._logged |= logs
        if state.global_step % OPTIMIZER_STEPS or "train_runtime" in logs:
            return
        assert self.trainer is not None
        row = {"step": state.global_step // OPTIMIZER_STEPS, **self.trainer.clock.lap()}
        row["perf/total_num_tokens"] = self.trainer.num_tokens
        row["perf/throughput"] = self.trainer.num_tokens / row["timing_s/step"]
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            row["perf/device_memory_gb"] = (total - free) / 2**30
            row["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        row["critic/score/mean"] = self._logged.get("reward")
        for kind in ("mean", "max"):
            gap = self._logged.get(f"sampling/sampling_logp_difference/{kind}")
            row[f"training/rollout_logprobs_diff_{kind}"] = gap
        row["response_length/mean"] = self._logged.get("completions/mean_length")
        row["actor/grad_norm"] = self._logged.get("grad_norm")
        with self._out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def experts_in_engine(trainer: TimedGRPO, model: Path) -> dict[str, float]:
    """Whether a sync of TRL reaches the engine's experts: the largest differences of layer 0's first expert (its gate)
    and attention (its output), between the engine after a sync, the trained weights and the model's files."""
    from safetensors import safe_open

    trainer.vllm_generation.sync_weights()
    engine = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    trained = dict(trainer.model.named_parameters())
    layer = "model.layers.0."
    with safe_open(model / "model.safetensors", "pt") as file:
        files = {
            "expert": file.get_tensor(f"{layer}mlp.experts.0.gate_proj.weight"),
            "attention": file.get_tensor(f"{layer}self_attn.o_proj.weight"),
        }
    rows = files["expert"].shape[0]
    weights = {
        "engine": {
            "expert": next(w for name, w in engine.named_parameters() if name.endswith("w13_weight"))[0, :rows],
            "attention": next(w for name, w in engine.named_parameters() if name.endswith("o_proj.weight")),
        },
        "trained": {
            "expert": trained[f"{layer}mlp.experts.gate_up_proj"][0, :rows],
            "attention": trained[f"{layer}self_attn.o_proj.weight"],
        },
        "files": files,
    }
    bf16 = {who: {kind: w.detach().cpu().bfloat16() for kind, w in pair.items()} for who, pair in weights.items()}
    return {
        f"{kind}: |{one} - {other}|": float((bf16[one][kind] - bf16[other][kind]).abs().max())
        for kind in ("expert", "attention")
        for one, other in (("trained", "files"), ("engine", "trained"), ("engine", "files"))
    }


def config(args: argparse.Namespace, out: Path) -> GRPOConfig:
    on_gpu = torch.cuda.is_available()
    per_optimizer_step = args.prompts * ANSWERS // OPTIMIZER_STEPS
    return GRPOConfig(
        output_dir=str(out.with_suffix("")),
        max_steps=args.steps * OPTIMIZER_STEPS,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=per_optimizer_step // args.micro_batch,
        generation_batch_size=args.prompts * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=args.new_tokens,
        shuffle_dataset=False,
        temperature=1.0,
        generation_kwargs={"ignore_eos": True} if args.generate == "vllm" else {"min_new_tokens": args.new_tokens},
        use_vllm=args.generate == "vllm",
        vllm_mode="colocate",
        vllm_model_impl=args.model_impl,
        vllm_gpu_memory_utilization=args.memory,
        vllm_max_model_length=args.max_length,
        model_init_kwargs={"dtype": args.dtype},
        bf16=on_gpu,
        gradient_checkpointing=False,
        loss_type="dapo",
        epsilon=0.2,
        beta=0.0,
        router_aux_loss_coef=0.0,
        scale_rewards="group",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, help="what scripts.bench.peers.inputs wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5, help="rollouts")
    parser.add_argument("--prompts", type=int, default=64, help="per rollout")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=64, help="answers in one forward and backward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trained weights")
    parser.add_argument("--generate", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model-impl", choices=("vllm", "transformers"), default="vllm", help="vLLM's model code")
    parser.add_argument("--check-engine", action="store_true", help="say whether the experts in vLLM were updated")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU for vLLM")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of prompt and answer that vLLM allows")
    args = parser.parse_args()
    args.out.unlink(missing_ok=True)
    rows = Rows(args.out)
    trainer = TimedGRPO(
        model=str(args.inputs / "model"),
        reward_funcs=trl_scores,
        args=config(args, args.out),
        train_dataset=load_dataset("json", data_files=str(args.inputs / "prompts.jsonl"), split="train"),
        callbacks=[rows],
    )
    rows.trainer = trainer
    trainer.train()
    if args.check_engine:
        print(json.dumps(experts_in_engine(trainer, args.inputs / "model"), indent=1), flush=True)


if __name__ == "__main__":
    main()

"""What a training step has the host launch: torch operations of a layer's forward and backward and of a whole step,
counted on a CPU along the branches that CUDA takes.

usage: python -m scripts.bench.dispatches [--config CONFIG.json] [--microbatches 2] [--kernels] [--out DIR]

Two steps with few tokens, of two layers and of three, in bfloat16; the difference is a layer. CONFIG.json is a model's;
by default that of SmolLM2's mixture. Operations that launch nothing (views, allocations) are counted apart. What CUDA
has as one kernel counts as one: attention, and each function that is compiled there, forward and backward. A sort or a
scan is several kernels there, an operation here. --kernels lists all operations. Writes dispatches-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.machine import RESULTS, hardware, versions
from scripts.bench.processes import on_ranks

MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30, "num_local_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "hidden_act": "silu",
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip
NO_LAUNCH = (
    "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand",
    "is_same_size", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "unsafe_split", "view", "view_as",
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view",
)  # fmt: skip
Count = Counter[tuple[str, str]]


class Dispatches(TorchDispatchMode):
    """Counts (phase, operation); the phase is forward, backward or step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Count = Counter()
        self.in_forward = self.within_one = False
        self._of_one: dict[Any, tuple[str, int]] = {}
        self._seen: set[int] = set()
        self._calls = 0

    def watch(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: setattr(self, "in_forward", True))
        module.register_forward_hook(lambda *_: setattr(self, "in_forward", False))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        node, name = torch._C._current_autograd_node(), func._schema.name.split("::")[1].partition(".")[0]
        if node in self._of_one:
            name, call = self._of_one[node]
            if call not in self._seen:
                self.counts["backward", name] += 1
            self._seen.add(call)
        elif not self.within_one:
            self.counts[self._phase(), "no launch" if name in NO_LAUNCH else name] += 1
        return output

    def _phase(self) -> str:
        in_backward = torch._C._current_autograd_node() is not None
        return "backward" if in_backward else "forward" if self.in_forward else "step"

    def as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose operations count as one of this name in the forward and one in the backward."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if self.within_one:
                return function(*args, **options)
            self.within_one = True
            output = function(*args, **options)
            self.within_one = False
            self.counts[self._phase(), name] += 1
            self._calls += 1
            outputs = output if isinstance(output, tuple) else (output,)
            before = {x.grad_fn for x in args if isinstance(x, torch.Tensor)}
            new = [x.grad_fn for x in outputs if isinstance(x, torch.Tensor)]
            while new:
                node = new.pop()
                if node is not None and node not in before and node not in self._of_one:
                    self._of_one[node] = (name, self._calls)
                    new += [below for below, _ in node.next_functions if type(below).__name__ != "AccumulateGrad"]
            return output

        return call


def take_cudas_branches(counted: Dispatches) -> None:
    """Before the trainer's modules are imported: they take these functions with them."""
    from rlhpc.backends.megatron import fused

    fused.fused = lambda function, *, dynamic=None: counted.as_one(function.__name__, function)
    from rlhpc.backends.megatron import attention, attention_backend, norm

    class OnCuda(norm.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return norm._token_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)

    norm.RMSNorm.forward = OnCuda.forward
    by_length = attention.PackedAttention._by_length
    attention_backend.TAKES_GROUPS = False  # torch 2.11, as vLLM 0.24 needs it

    def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            return by_length(self, q, k, v, packed).view(*q.shape[:2], -1)

        attention_backend.varlen_attn = counted.as_one("varlen_attn", kernel)
        return attention_backend.flash_attention(
            query, key, value, packed.cu_seqlens_q, packed.max_seqlen_q, self.scale
        )

    attention.PackedAttention.attend = attend


def count(layers: int, config: dict[str, Any], microbatches: int) -> list[tuple[str, str, int]]:
    """Of one step of a world of one rank."""
    from safetensors.torch import save_file

    from rlhpc.reshard.families import family_for
    from rlhpc.train.protocols import LossSpec
    from scripts.bench.train import batches_of, build, sequences

    counted = Dispatches()
    take_cudas_branches(counted)
    config = config | {"num_hidden_layers": layers, "vocab_size": 512}
    args = argparse.Namespace(ranks=1, tokens=256, length=64, prompt=16, ep=1, recompute=[], overlap=False)
    args.attention = "auto"
    with tempfile.TemporaryDirectory() as folder:
        tensors = {
            name: (torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape)).bfloat16()
            for name, shape in family_for(config).canonical_tensors(config).items()
        }
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        trainer = build(Path(folder), args, "cpu")
    loss = LossSpec(
        loss_mode="vanilla", clip_low=0.2, clip_high=0.2, clip_c=3.0, loss_agg_mode="token-mean",
        num_global_tokens=1.0, num_global_seqs=1.0, loss_scale_factor=None, entropy_coeff=0.0, kl_coef=0.0,
        kl_type="k3", temperature=1.0,
    )  # fmt: skip
    batches = batches_of(trainer, sequences(args, 512, seed=0), args) * microbatches
    trainer.step(batches, loss)  # the first makes more than the others
    counted.watch(trainer.policy.module)
    counted.counts.clear()
    with counted:
        trainer.step(batches, loss)
    return [(*key, times) for key, times in counted.counts.items()]


def layer_of(one_less: Count, one_more: Count) -> dict[str, Any]:
    """Of the layer that the second count has more: operations and what launches nothing, by phase."""
    found: dict[str, Any] = {}
    for phase in ("forward", "backward", "step"):
        names = {name for where, name in one_less | one_more if where == phase}
        more = {name: one_more[phase, name] - one_less[phase, name] for name in names}
        more = {name: times for name, times in sorted(more.items()) if times}
        found[phase] = {"no launch": more.pop("no launch", 0), "launches": sum(more.values()), "operations": more}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--kernels", action="store_true", help="list the operations")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    config = json.loads(args.config.read_text()) if args.config else MIXTURE
    found = [on_ranks(1, "cpu", count, layers, config, args.microbatches) for layers in (2, 3)]
    two, three = (Counter({(phase, name): times for phase, name, times in counts}) for counts in found)
    layer = layer_of(two, three)
    launched = sum(times for (_, name), times in two.items() if name != "no launch")
    beside = launched - 2 * sum(layer[phase]["launches"] for phase in layer)
    report = {
        "command": " ".join(["python -m scripts.bench.dispatches", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions("torch", "megatron-core"),
        "model": f"{config['model_type']}, hidden {config['hidden_size']}",
        "microbatches": args.microbatches,
        "a layer": layer,
        "a step without its layers": beside,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "dispatches-cpu.json").write_text(json.dumps(report, indent=2) + "\n")
    for phase, part in layer.items():
        print(f"a layer's {phase}: {part['launches']} launches, {part['no launch']} operations without")
        for name, times in part["operations"].items() if args.kernels else ():
            print(f"  {times:4} {name}")
    print(f"a step without its layers: {beside} launches")


if __name__ == "__main__":
    main()

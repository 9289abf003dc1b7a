"""A dense Llama made a mixture of experts: sparse upcycling (arXiv 2212.05055) into Mixtral's shape.

Every MLP is copied into all experts of its layer, beside a router of small random weights; all else stays. Mixtral
renormalises the routing weights over the chosen experts, so they sum to one, and while the experts are identical their
weighted mean is the dense MLP: the model starts with the dense model's outputs. Training parts the experts: each learns
from the tokens that its random router sends it. The routers, whose gradient is zero while all experts answer alike,
follow from the second step on.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open

from rlhpc.errors import ConfigError, ModelError
from rlhpc.reshard.families import FAMILIES
from rlhpc.reshard.families.quantised import KEY, fp8_block
from rlhpc.reshard.hf import FILE_BYTES, check_hf, copy_side_files, file_names, index_text, write_tensors
from rlhpc.reshard.hf_files import INDEX_NAME

DENSE, SPARSE = FAMILIES["llama"], FAMILIES["mixtral"]
LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp", "rope_interleaved", "is_llama_config")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.experts\.\d+\.(w[123])\.weight")


@dataclass(frozen=True)
class Upcycling:
    """`router_std`: of the routers' weights, 0.02 as in the paper's appendix. `expert_noise`: standard deviation of
    noise added to each expert's weights, relative to the weights' own; above 0 the outputs aren't the dense model's."""

    num_experts: int
    experts_per_token: int
    router_std: float = 0.02
    expert_noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 2:
            raise ConfigError(f"num_experts={self.num_experts} must be at least 2")
        if not 2 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be within 2..num_experts={self.num_experts}: Mixtral "
                "gives a single expert the weight 1 whatever its router says, which then learns nothing"
            )
        if not 0 < self.router_std < inf:
            raise ConfigError(
                f"router_std={self.router_std} must be positive: equal routers use the same experts always"
            )
        if not 0 <= self.expert_noise < inf:
            raise ConfigError(f"expert_noise={self.expert_noise} must be at least 0")


def upcycle(source: Path, target: Path, recipe: Upcycling, *, file_bytes: int = FILE_BYTES) -> str:
    """Writes the HF directory `target`, whole or not at all; returns what it is in a sentence.

    Holds at most one file of `file_bytes` in memory. Tensors keep the source's dtype, and the names that published
    Mixtral checkpoints have. Raises ModelError: `source` isn't a dense Llama, is damaged, or `target` exists.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ModelError(f"{target} exists; choose another directory, or remove it")
    dense = _read_config(source)
    sparse = sparse_config(dense, recipe)
    shapes = SPARSE.canonical_tensors(sparse)
    tensors = _Source(source, DENSE.canonical_tensors(dense))
    made = ((name, make_tensor(name, shapes[name], tensors, recipe)) for name in track(shapes, "upcycling"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            directory = Path(scratch) / target.name
            directory.mkdir()
            copy_side_files(source, directory)
            total = write_files(made, directory, file_bytes)
            (directory / "config.json").write_text(json.dumps(sparse, indent=2) + "\n")
            directory.rename(target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target} can't be written: {error}; free some space or choose another directory") from error
    experts = f"{recipe.num_experts} experts a layer, {recipe.experts_per_token} per token"
    return f"made {target}: {experts}, {total:,} parameters"


def sparse_config(dense: Mapping[str, Any], recipe: Upcycling) -> dict[str, Any]:
    """The Mixtral config.json of an upcycled Llama; what the two share is carried over as it is spelled.

    Raises ModelError for what is not a Llama, or for options that Mixtral has not.
    """
    if (kind := dense.get("model_type")) != DENSE.model_type:
        raise ModelError(f"model_type={kind!r} is not a dense Llama; only model_type='llama' can be upcycled")
    facts = DENSE.model_facts(dense)
    if fp8_block(dense):
        raise ModelError(
            f"config.json: {KEY}={dense[KEY]!r}: quantised files can't be upcycled; convert them to bfloat16 and "
            "remove the key"
        )
    explicit = {  # where Llama's and Mixtral's defaults differ
        "num_key_value_heads": facts.num_kv_heads,
        "rope_theta": facts.rope_theta,
        "sliding_window": None,
    }
    return (
        {key: value for key, value in dense.items() if key not in LLAMA_ONLY}
        | explicit
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": SPARSE.model_type,
            "num_local_experts": recipe.num_experts,
            "num_experts_per_tok": recipe.experts_per_token,
            "output_router_logits": False,
        }
    )


class _Source:
    """The dense model's tensors, read one at a time."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._files = check_hf(directory, shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {name} can't be read ({error}); copy the file again") from error
        return tensor


def make_tensor(name: str, shape: tuple[int, ...], dense: _Source, recipe: Upcycling) -> torch.Tensor:
    """One tensor of the mixture of experts. Random ones depend on seed and name alone."""
    seed = hashlib.blake2b(f"{recipe.seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    if name.endswith("block_sparse_moe.gate.weight"):
        dtype = dense[name.replace("block_sparse_moe.gate", "mlp.gate_proj")].dtype
        return (recipe.router_std * torch.randn(shape, generator=generator)).to(dtype)
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return dense[name]
    layer, projection = expert.groups()
    weight = dense[f"{layer}.mlp.{PROJECTIONS[projection]}.weight"]
    if not recipe.expert_noise:
        return weight
    noise = recipe.expert_noise * weight.float().std() * torch.randn(shape, generator=generator)
    return (weight.float() + noise).to(weight.dtype)


def write_files(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, file_bytes: int) -> int:
    """Writes model.safetensors, or several files of at most `file_bytes` (but at least one tensor) and their index.
    Returns the number of parameters."""
    contents: list[list[str]] = []
    num_parameters = total_bytes = 0
    for group in _groups(tensors, file_bytes):
        write_tensors(group, directory / f"{len(contents)}.partial")
        contents.append(list(group))
        num_parameters += sum(tensor.numel() for tensor in group.values())
        total_bytes += sum(tensor.nbytes for tensor in group.values())
    names = file_names(len(contents))
    for i, name in enumerate(names):
        (directory / f"{i}.partial").rename(directory / name)
    if len(names) > 1:
        (directory / INDEX_NAME).write_text(index_text(dict(zip(names, contents, strict=True)), total_bytes))
    return num_parameters


def _groups(tensors: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if group and sum(held.nbytes for held in group.values()) + tensor.nbytes > file_bytes:
            yield group
            group = {}
        group[name] = tensor
    yield group


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read as JSON ({error}); give an HF model directory") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a JSON {type(config).__name__}, not an object of settings")
    return config

"""HF safetensors in and out through the planner: a rank reads only its boxes and writes only the tensors it owns."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhpc.errors import ModelError
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.execute import Resharder, region
from rlhpc.reshard.plan import ITEM_BYTES, plan

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FILE_BYTES = 4 * 1024**3
IGNORABLE = ("rotary_emb.inv_freq",)  # buffers that old exports carry and every implementation computes
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in an HF directory. Raises ModelError naming what is missing or damaged."""
    index = directory / INDEX_NAME
    if index.exists():
        try:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} is damaged ({error!r}); copy it again from the model's source") from error
        files = {name: directory / file for name, file in names.items()}
        for path in sorted({path for path in files.values() if not path.exists()}):
            raise ModelError(f"{path} is missing, though {INDEX_NAME} names it; copy it from the model's source")
        return files
    single = directory / SINGLE_NAME
    if not single.exists():
        raise ModelError(f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}; give a directory in HF format")
    with _open(single) as file:
        return {name: single for name in file.keys()}  # noqa: SIM118


def load_hf(directory: Path, specs: Sequence[ShardSpec], rank: int, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's buffers with its boxes of the directory's tensors, cast to the buffers' dtype.

    Only those bytes are read. Raises ModelError, naming file and tensor, for what is missing, truncated, of another
    shape, or unknown.
    """
    directory = Path(directory)
    files = tensor_files(directory)
    _check_names(directory, files, specs)
    wanted: dict[Path, list[tuple[ShardSpec, Shard]]] = defaultdict(list)
    for spec in specs:
        for shard in spec.shards:
            if shard.rank == rank:
                wanted[files[spec.name]].append((spec, shard))
    for path, boxes in sorted(wanted.items()):
        with _open(path) as file:
            held = set(file.keys())
            for spec, shard in boxes:
                if spec.name not in held:
                    raise ModelError(f"{path} lacks {spec.name}, which {INDEX_NAME} says it holds")
                source = file.get_slice(spec.name)
                if tuple(source.get_shape()) != spec.shape:
                    raise ModelError(
                        f"{path}: {spec.name} has shape {tuple(source.get_shape())}; config.json asks for {spec.shape}"
                    )
                box = source[tuple(slice(a, b) for a, b in zip(shard.start, shard.stop, strict=True))]
                extent = tuple(b - a for a, b in zip(shard.start, shard.stop, strict=True))
                lead = (1,) * (len(shard.offset) - len(extent))
                with torch.no_grad():
                    region(buffers[shard.buffer], shard.offset, lead + extent).copy_(box.reshape(lead + extent))


def save_hf(
    directory: Path,
    specs: Sequence[ShardSpec],
    rank: int,
    group: dist.ProcessGroup | None,
    buffers: Mapping[str, torch.Tensor],
    hf_source_dir: Path,
) -> None:
    """Writes the tensors as an HF directory with the source's config and tokenizer. Collective over `group`.

    Tensors go to owner ranks, balanced by bytes, and from there to files of at most FILE_BYTES; one file at a time is
    gathered, which bounds the extra memory. The index, which makes the directory readable, is written last.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    device = next(iter(buffers.values())).device
    groups = _file_groups(specs)
    world_size = dist.get_world_size(group)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    for begin in range(0, len(groups), world_size):  # one file per rank and round
        owned = {begin + r: r for r in range(world_size) if begin + r < len(groups)}
        targets = [_whole(spec, owner) for i, owner in owned.items() for spec in groups[i]]
        mine = groups[begin + rank] if begin + rank in owned else []
        gathered = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=device) for s in mine}
        Resharder(plan(specs, targets), rank, group).run(buffers, gathered)
        if mine:
            partial = directory / f".{names[begin + rank]}.partial"
            save_file({name: tensor.cpu() for name, tensor in gathered.items()}, partial, metadata={"format": "pt"})
            os.replace(partial, directory / names[begin + rank])
    dist.barrier(group)
    if rank == 0:
        _copy_side_files(Path(hf_source_dir), directory)
        _write_index(directory, dict(zip(names, groups, strict=True)))
    dist.barrier(group)


def _whole(spec: ShardSpec, rank: int) -> ShardSpec:
    """The tensor in one piece on one rank, in a buffer of its own name."""
    origin = (0,) * len(spec.shape)
    return ShardSpec(spec.name, spec.shape, spec.dtype, (Shard(rank, origin, spec.shape, spec.name, origin),))


def _check_names(directory: Path, files: Mapping[str, Path], specs: Iterable[ShardSpec]) -> None:
    known = {spec.name for spec in specs}
    if missing := sorted(known - files.keys()):
        raise ModelError(
            f"{directory} lacks {len(missing)} tensors that config.json asks for: {', '.join(missing[:4])}"
        )
    extra = [name for name in sorted(files.keys() - known) if not name.endswith(IGNORABLE)]
    # A tied model's files may repeat the embedding as its head.
    extra = [name for name in extra if not (name == "lm_head.weight" and "model.embed_tokens.weight" in known)]
    if extra:
        raise ModelError(
            f"{directory} holds {len(extra)} tensors that the model of config.json doesn't have: {', '.join(extra[:4])}"
        )


def _file_groups(specs: Sequence[ShardSpec]) -> list[list[ShardSpec]]:
    """Tensors in order, cut into files of at most FILE_BYTES."""
    groups: list[list[ShardSpec]] = [[]]
    size = 0
    for spec in specs:
        num_bytes = prod(spec.shape) * ITEM_BYTES[spec.dtype]
        if groups[-1] and size + num_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += num_bytes
    return groups


def _copy_side_files(source: Path, directory: Path) -> None:
    if source.resolve() == directory.resolve():
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, directory / path.name)


def _write_index(directory: Path, groups: Mapping[str, Sequence[ShardSpec]]) -> None:
    total = sum(prod(s.shape) * ITEM_BYTES[s.dtype] for group in groups.values() for s in group)
    weight_map = {spec.name: file for file, group in groups.items() for spec in group}
    partial = directory / f".{INDEX_NAME}.partial"
    partial.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    os.replace(partial, directory / INDEX_NAME)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read ({error}): truncated or damaged; copy it again") from error

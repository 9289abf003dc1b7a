"""HF safetensors in and out: a rank reads only its boxes and writes only the tensors that it owns."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import floordiv
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from rlhpc.checkpoint.durable import fsync
from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.errors import CheckpointError, ModelError
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.execute import Resharder, region
from rlhpc.reshard.families.family import EMBED, HEAD
from rlhpc.reshard.families.quantised import Block
from rlhpc.reshard.fp8 import dequantise
from rlhpc.reshard.hf_files import (
    INDEX_NAME,
    SCALES,
    SINGLE_NAME,
    HfFiles,
    Stored,
    exported_config,
    open_file,
    read_config,
)
from rlhpc.reshard.plan import Index, plan

FILE_BYTES = 4 * 1024**3
NOT_COPIED = (  # weights, in whatever form the source has them
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json",
)  # fmt: skip


class Part(NamedTuple):
    """A box of a tensor: start[d] <= index[d] < stop[d]."""

    name: str
    start: Index
    stop: Index

    def scales(self, block: Block) -> Part:
        """The scales of the blocks that it touches."""
        first = tuple(map(floordiv, self.start, block))
        return Part(
            self.name + SCALES, first, tuple(-(-stop // size) for stop, size in zip(self.stop, block, strict=True))
        )


def load_hf(directory: Path, specs: Sequence[ShardSpec], rank: int, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's buffers with its boxes of the directory's tensors, rounded to the buffers' dtype.

    Only those bytes are read, and of fp8 tensors the scales of their blocks. Raises ModelError, naming file and tensor,
    for what is missing, truncated, unknown, quantised in another way or of another shape than the specs'.
    """
    held = HfFiles(Path(directory))
    held.check_names({spec.name for spec in specs})
    targets: dict[Part, list[torch.Tensor]] = defaultdict(list)
    shapes: dict[str, Index] = {}
    for spec in specs:
        for shard in spec.on(rank):
            shapes[spec.name] = spec.shape
            target = region(buffers[shard.buffer], shard.offset, shard.extent)
            targets[Part(spec.name, shard.start, shard.stop)].append(target.view(shard.shape))
    stored, block = held.stored(shapes), held.block
    quantised = {part: part.scales(block) for part in targets if block and held.has_scales(part.name)}
    scales = dict(_read(held, stored, dict.fromkeys(quantised.values())))
    with torch.no_grad():
        for part, box in _read(held, stored, targets):
            for target in targets[part]:
                if block and part in quantised:
                    dequantise(box, scales[quantised[part]], block, part.start, target)
                else:
                    target.copy_(box.reshape(target.shape))


def _read(held: HfFiles, stored: Mapping[str, Stored], parts: Iterable[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Each part with its values, file after file."""
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_name[part.name].append(part)
    for path, names in held.by_file(by_name).items():
        with open_file(path) as file:
            held.check_headers(path, file, {name: stored[name] for name in names})
            for name in names:
                tensor = file.get_slice(name)
                yield from ((part, tensor[tuple(map(slice, part.start, part.stop))]) for part in by_name[name])


def check_hf(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """The file of every tensor, after looking at all files' headers and reading no more: what `load_hf` would refuse on
    some rank is refused here, before anything starts.

    So is a head of its own beside embeddings that config.json ties (that one is read): Transformers would use it, vLLM
    would not. `shapes`: the model's canonical tensors. Raises ModelError as `load_hf` does.
    """
    held = HfFiles(Path(directory))
    held.check_names(shapes.keys())
    untied = HEAD in held.files.keys() - shapes.keys()
    held.sizes(held.stored({**shapes, HEAD: shapes[EMBED]} if untied else shapes))
    if untied:
        _check_tied(held, shapes[EMBED][0])
    return held.files


def _check_tied(held: HfFiles, rows: int, block: int = 16384) -> None:
    with open_file(held.files[EMBED]) as embeddings, open_file(held.files[HEAD]) as heads:
        embedding, head = embeddings.get_slice(EMBED), heads.get_slice(HEAD)
        starts = range(0, rows, block)
        if not all(torch.equal(embedding[i : i + block].float(), head[i : i + block].float()) for i in starts):
            raise ModelError(
                f"{held.directory}: config.json ties the embeddings, yet {HEAD} differs from {EMBED}; set "
                "tie_word_embeddings to false if the head was trained, or remove it from the files"
            )


def save_hf(
    directory: Path,
    specs: Sequence[ShardSpec],
    rank: int,
    group: dist.ProcessGroup | None,
    buffers: Mapping[str, torch.Tensor],
    hf_source_dir: Path,
) -> None:
    """Writes the tensors as an HF directory with the source's config and tokenizer. Collective over `group`.

    Every rank gathers and writes its share of the files, one at a time; a file holds at most FILE_BYTES, which with
    the Resharder's bucket is the extra memory. The index, which makes several files readable, comes last, and only
    then do files of an earlier save go. Raises CheckpointError on all ranks together where one can't write.
    """
    directory, source = Path(directory), Path(hf_source_dir)
    if directory.resolve() == source.resolve():
        raise CheckpointError(f"{directory} is the model that training began from; save to another directory")
    world_size = dist.get_world_size(group)
    files = _files(specs, world_size)
    names = list(files)
    for begin in range(0, len(names), world_size):  # one file per rank and round
        turn = dict(enumerate(names[begin : begin + world_size]))
        targets = [
            ShardSpec.whole(spec.name, spec.shape, spec.dtype, (owner,))
            for owner, name in turn.items()
            for spec in files[name]
        ]
        mine = files[turn[rank]] if rank in turn else []
        device = next(iter(buffers.values())).device
        gathered = {s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=device) for s in mine}
        Resharder(plan(specs, targets), rank, group).run(buffers, gathered)
        failure = _write_file(directory / turn[rank], gathered) if mine else None
        _raise_together(failure, group)
    failure = _finish(directory, source, files) if rank == 0 else None
    _raise_together(failure, group)


def _files(specs: Sequence[ShardSpec], world_size: int) -> dict[str, list[ShardSpec]]:
    """Tensors by file, in order: as many files as ranks, or more where FILE_BYTES asks for it."""
    by_name = {spec.name: spec for spec in specs}
    sizes = {name: _num_bytes(spec) for name, spec in by_name.items()}
    limit = min(FILE_BYTES, -(-sum(sizes.values()) // world_size))
    return {file: [by_name[name] for name in names] for file, names in split_into_files(sizes, limit).items()}


def split_into_files(sizes: Mapping[str, int], file_bytes: int) -> dict[str, list[str]]:
    """Tensors (name -> bytes) by file as HF directories have them, in order: as many in each as fit into `file_bytes`,
    at least one."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return dict(zip(file_names(len(groups)), groups, strict=True))


def file_names(count: int) -> list[str]:
    """What a model's files are called: SINGLE_NAME for one, which needs no index."""
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_NAME]


def _num_bytes(spec: ShardSpec) -> int:
    return prod(spec.shape) * ITEM_BYTES[spec.dtype]


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Writes one file under its name only when it is whole; returns why it couldn't."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, partial)
        _publish(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        return f"{path} can't be written: {error}"
    return None


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A safetensors file as Transformers wants it. Raises OSError and SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors 0.8 lets nobody but the owner read what it writes


def _finish(directory: Path, source: Path, files: Mapping[str, Sequence[ShardSpec]]) -> str | None:
    """Config and tokenizer, then the index, then removal of an earlier save's files; returns why it couldn't."""
    total = sum(_num_bytes(spec) for group in files.values() for spec in group)
    index = directory / INDEX_NAME
    partial = index.with_name(f".{index.name}.partial")
    try:
        copy_side_files(source, directory)
        if SINGLE_NAME in files:
            index.unlink(missing_ok=True)
        else:
            names = {name: [spec.name for spec in group] for name, group in files.items()}
            partial.write_text(index_text(names, total))
            _publish(partial, index)
        for stale in directory.glob("model*.safetensors"):
            if stale.name not in files:
                stale.unlink()
    except OSError as error:
        return f"{directory} can't be completed: {error}"
    return None


def copy_side_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer, licence and whatever else a model directory holds beside weights and their index."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, target / path.name)
    if (exported := exported_config(config := read_config(source))) != config:
        (target / "config.json").write_text(json.dumps(exported, indent=2) + "\n")


def index_text(files: Mapping[str, Sequence[str]], total_bytes: int) -> str:
    """The content of INDEX_NAME: `files` are the names of the tensors in each."""
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"


def _publish(partial: Path, path: Path) -> None:
    fsync(partial)
    os.replace(partial, path)


def _raise_together(failure: str | None, group: dist.ProcessGroup | None) -> None:
    """Tells all ranks of one rank's failure: the others would wait for it in the next collective."""
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    if told := [text for text in failures if text]:
        raise CheckpointError("; ".join(told))

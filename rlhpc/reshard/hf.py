"""HF safetensors in and out: a rank reads only its boxes and writes only the tensors that it owns."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhpc.checkpoint.durable import fsync
from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.errors import CheckpointError, ModelError
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.execute import Resharder, region
from rlhpc.reshard.families.family import EMBED, HEAD
from rlhpc.reshard.plan import plan

logger = logging.getLogger(__name__)

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FILE_BYTES = 4 * 1024**3
FURTHER_LAYERS = "num_nextn_predict_layers"  # of config.json
READABLE = ("F64", "F32", "BF16", "F16")  # cast to the buffers' dtype; the rest is quantised
IGNORABLE = ("rotary_emb.inv_freq",)  # buffers that old exports carry and every implementation computes
NOT_COPIED = (  # weights, in whatever form the source has them
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json",
)  # fmt: skip


def load_hf(directory: Path, specs: Sequence[ShardSpec], rank: int, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's buffers with its boxes of the directory's tensors, cast to the buffers' dtype.

    Only those bytes are read. Raises ModelError, naming file and tensor, for what is missing, truncated, unknown,
    quantised or of another shape than the specs'.
    """
    directory = Path(directory)
    files = tensor_files(directory)
    _check_names(directory, files, {spec.name for spec in specs})
    wanted: dict[Path, list[tuple[ShardSpec, Shard]]] = defaultdict(list)
    for spec in specs:
        for shard in spec.on(rank):
            wanted[files[spec.name]].append((spec, shard))
    for path, boxes in sorted(wanted.items()):
        with _open(path) as file:
            _check_shapes(path, file, {spec.name: spec.shape for spec, _ in boxes})
            for spec, shard in boxes:
                _read(file, spec, shard, buffers[shard.buffer])


def check_hf(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """The file of every tensor, after looking at all files' headers and reading no more: what `load_hf` would refuse on
    some rank is refused here, before anything starts.

    So is a head of its own beside embeddings that config.json ties (that one is read): Transformers would use it, vLLM
    would not. `shapes`: the model's canonical tensors. Raises ModelError as `load_hf` does.
    """
    directory = Path(directory)
    files = tensor_files(directory)
    _check_names(directory, files, shapes.keys())
    wanted: dict[Path, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        wanted[files[name]][name] = shape
    if HEAD in files.keys() - shapes.keys():
        wanted[files[HEAD]][HEAD] = shapes[EMBED]
    for path, inside in sorted(wanted.items()):
        with _open(path) as file:
            _check_shapes(path, file, inside)
    if HEAD in files.keys() - shapes.keys():
        _check_tied(directory, files, shapes[EMBED][0])
    return files


def _check_shapes(path: Path, file: safe_open, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if absent := sorted(shapes.keys() - set(file.keys())):
        raise ModelError(f"{path} lacks {absent[0]}, which {INDEX_NAME} says it holds; copy both again")
    for name, asked in shapes.items():
        header = file.get_slice(name)
        if (shape := tuple(header.get_shape())) != asked:
            raise ModelError(f"{path}: {name} has shape {shape}; config.json asks for {asked}")
        if (dtype := header.get_dtype()) not in READABLE:
            raise ModelError(f"{path}: {name} has dtype {dtype}; readable are {', '.join(READABLE)}")


def _check_tied(directory: Path, files: Mapping[str, Path], rows: int, block: int = 16384) -> None:
    with _open(files[EMBED]) as embeddings, _open(files[HEAD]) as heads:
        embedding, head = embeddings.get_slice(EMBED), heads.get_slice(HEAD)
        starts = range(0, rows, block)
        if not all(torch.equal(embedding[i : i + block].float(), head[i : i + block].float()) for i in starts):
            raise ModelError(
                f"{directory}: config.json ties the embeddings, yet {HEAD} differs from {EMBED}; set "
                "tie_word_embeddings to false if the head was trained, or remove it from the files"
            )


def _read(file: safe_open, spec: ShardSpec, shard: Shard, buffer: torch.Tensor) -> None:
    source = file.get_slice(spec.name)
    box = source[tuple(map(slice, shard.start, shard.stop))]
    with torch.no_grad():
        region(buffer, shard.offset, shard.extent).copy_(box.reshape(shard.extent))


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in an HF directory. Raises ModelError naming what is missing or damaged."""
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index.exists():
        try:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is damaged ({error!r}); copy it again from the model's source") from error
        files = {name: directory / file for name, file in names.items()}
        if missing := sorted({str(path) for path in files.values() if not path.exists()}):
            raise ModelError(f"{INDEX_NAME} names files that are missing: {_first(missing)}; copy them again")
        return files
    if not single.exists():
        raise ModelError(
            f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}; give an HF model directory with its weights as "
            "safetensors"
        )
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read ({error}): truncated or damaged; copy it again") from error


def _check_names(directory: Path, files: Mapping[str, Path], known: Set[str]) -> None:
    if missing := sorted(known - files.keys()):
        raise ModelError(
            f"{directory} lacks {len(missing)} tensors that config.json asks for: {_first(missing)}; copy the "
            "directory again, or mend config.json"
        )
    # A tied model's files may repeat the embedding as a head of its own.
    unread = files.keys() - known - {HEAD}
    prefixes = _further_layers(directory)
    further = {name for name in unread if name.startswith(prefixes)}
    if further:
        _say_once(directory, len(further))
    extra = sorted(name for name in unread - further if not name.endswith(IGNORABLE))
    if extra:
        raise ModelError(
            f"{directory} holds {len(extra)} tensors that config.json's model hasn't: {_first(extra)}; is it "
            "this model's config.json?"
        )


def _further_layers(directory: Path) -> tuple[str, ...]:
    """How the names of tensors begin that predict tokens beyond the next one (DeepSeek-V3's multi-token prediction):
    layers behind the model's own."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    first, count = config.get("num_hidden_layers", 0), config.get(FURTHER_LAYERS) or 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


@cache
def _say_once(directory: Path, count: int) -> None:
    logger.info(
        "%s: %d tensors predict tokens beyond the next one; they are neither trained nor exported", directory, count
    )


def exported_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that asks for no tensors but those that are exported."""
    return dict(config) | ({FURTHER_LAYERS: 0} if config.get(FURTHER_LAYERS) else {})


def _first(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


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
    if _further_layers(source):
        config = exported_config(json.loads((source / "config.json").read_text()))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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

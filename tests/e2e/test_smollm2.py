"""The real SmolLM2, from its package through upcycling: the mixture of experts is the dense model until it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhpc.cli.upcycle import Upcycling, upcycle
from scripts.make_smollm2 import ROOT, make

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def dense() -> Path:
    """Where the script puts it; made only the first time."""
    directory = ROOT / "outputs/assets/smollm2/dense"
    make(directory, None)
    return directory


@torch.no_grad()
def test_the_real_model_answers_and_upcycling_keeps_its_logits(dense: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(dense)
    chat = [{"role": "user", "content": QUESTION}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    answer = model.generate(**encoded, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, encoded["input_ids"].shape[1] :])
    assert answer[0, -1] == tokenizer.eos_token_id == 2  # it ends its turn
    expected = model(answer).logits
    del model
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=4, experts_per_token=2))
    moe = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    outputs = moe(answer, output_router_logits=True)
    # float32's rounding over 30 layers, of logits whose standard deviation is several units
    assert (outputs.logits - expected).abs().max() < 1e-3 < 1 < expected.std()
    for layer in outputs.router_logits:
        assert len(layer.topk(2).indices.sort().values.unique(dim=0)) > 1

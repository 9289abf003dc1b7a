"""Rotary frequencies against the definition, one frequency at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhpc.backends.megatron.attention import rotary_frequencies
from rlhpc.reshard.families import model_facts
from rlhpc.reshard.families.facts import Llama3Scaling, YarnScaling
from tests.unit.reshard.reference import CONFIGS

FACTS = replace(model_facts(CONFIGS["llama"]), head_dim=64, rope_theta=5e5)


def test_default_is_a_geometric_series() -> None:
    assert rotary_frequencies(FACTS).tolist() == pytest.approx([5e5 ** (-i / 32) for i in range(32)], rel=1e-6)


def test_llama3_keeps_short_and_stretches_long_wavelengths() -> None:
    """Llama 3.2's numbers: below 8192 / 4 positions kept, above 8192 / 1 divided by 32, a ramp in between."""
    scaled = rotary_frequencies(replace(FACTS, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))).tolist()
    kinds = {"kept": 0, "ramp": 0, "divided": 0}
    for i, frequency in enumerate(scaled):
        original = 5e5 ** (-i / 32)
        wavelength = 2 * math.pi / original
        if wavelength < 2048:
            kind, expected = "kept", original
        elif wavelength > 8192:
            kind, expected = "divided", original / 32
        else:
            ramp = (8192 / wavelength - 1) / 3
            kind, expected = "ramp", (1 - ramp) * original / 32 + ramp * original
        kinds[kind] += 1
        assert frequency == pytest.approx(expected, rel=2e-6), (i, kind)
    assert kinds == {"kept": 15, "ramp": 3, "divided": 14}


def test_yarn_keeps_what_turns_often_and_stretches_what_hardly_turns() -> None:
    """DeepSeek-V3's numbers: pair i of 32 turns 4096 / (2 pi 10000^(i / 32)) times. 32 turns are those of pair 10.5 and
    one turn of pair 22.5, whose neighbours outwards, 10 and 23, are where the ramp begins and ends."""
    facts = model_facts(CONFIGS["deepseek_v3"] | {"qk_rope_head_dim": 64})
    scaling = YarnScaling(40.0, 32.0, 1.0, 4096, temperature=1.0)
    scaled = rotary_frequencies(replace(facts, rope_theta=1e4, rope_scaling=scaling)).tolist()
    for i, frequency in enumerate(scaled):
        original = 1e4 ** (-i / 32)
        divided = min(max((i - 10) / 13, 0.0), 1.0)
        assert frequency == pytest.approx((1 - divided) * original + divided * original / 40, rel=2e-6), i

"""The rollout engine on real ranks: logprobs against Transformers and numpy, agreement, stops, clean-up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.backends.vllm.environment import CACHES
from rlhpc.backends.vllm.shm import cleanup_shm
from rlhpc.cli.main import main
from rlhpc.data.types import Completion
from rlhpc.reshard.families import family_for
from tests.distributed import vllm_ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.vllm_reference import Logits, assert_routed, expected, processed_logprobs, transformers_logits
from tests.hf_files import read_tensors
from tests.saved_runs import write_checkpoint, write_run
from tests.tiny_model import write_tiny_model

RANKS = "tests.distributed.vllm_ranks"
VOCAB, EOS = 320, {2, 4}


def random_prompts(lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    rng = np.random.default_rng(0)
    return [(100 + i, rng.integers(5, VOCAB, length).tolist()) for i, length in enumerate(lengths)]


PROMPTS = random_prompts((1, 5, 17, 40, 129, 150))
LONG_PROMPTS = random_prompts((140, 170, 192))  # longer than a block of the prefix cache, 128 tokens on CPU
SPECS = {
    "plain": vllm_ranks.spec(n=3),
    "tempered": vllm_ranks.spec(n=2, temperature=0.6),
    "top_k": vllm_ranks.spec(n=2, temperature=1.3, top_k=7),
    "top_p": vllm_ranks.spec(n=2, top_p=0.6),
    "both": vllm_ranks.spec(n=2, temperature=0.8, top_k=20, top_p=0.7),
    "greedy": vllm_ranks.spec(temperature=0.0),
    "stopping": vllm_ranks.spec(n=16, temperature=2.0, max_response_length=64, ignore_eos=False, routing=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"moe_intermediate_size": 128}  # 64 a rank: reload_weights fails outright on sizes that CPU kernels pad
    return write_tiny_model(root / "old", seed=0, **sizes), write_tiny_model(root / "new", seed=1, **sizes)


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> dict[Path, Logits]:
    return {path: transformers_logits(path) for path in models}


@pytest.fixture(scope="module")
def rolled(models: tuple[Path, Path]) -> list[dict[str, Any]]:
    return run_ranks(f"{RANKS}:rollout", 2, model_dir=str(models[0]), prompts=PROMPTS, specs=SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_sampled_logprobs_are_those_of_the_processed_distribution(
    name: str, rolled: list[dict[str, Any]], models: tuple[Path, Path], reference: dict[Path, Logits]
) -> None:
    prompts = dict(PROMPTS)
    answers: list[Completion] = rolled[0]["samples"][name][0]
    assert [(a.prompt_id, a.sample_idx) for a in answers] == [(i, k) for i, _ in PROMPTS for k in range(SPECS[name].n)]
    for answer in answers:
        assert answer.token_ids.dtype == np.int32 and answer.logprobs.dtype == np.float32
        wanted = expected(reference[models[0]], prompts[answer.prompt_id], answer.token_ids, SPECS[name])
        np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)


def test_greedy_takes_the_most_likely_token(
    rolled: list[dict[str, Any]], models: tuple[Path, Path], reference: dict[Path, Logits]
) -> None:
    for answer in rolled[0]["samples"]["greedy"][0]:
        prompt = dict(PROMPTS)[answer.prompt_id]
        rows = reference[models[0]]([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert rows.argmax(-1).tolist() == answer.token_ids.tolist()


def test_samples_follow_the_distribution(
    rolled: list[dict[str, Any]], models: tuple[Path, Path], reference: dict[Path, Logits]
) -> None:
    """4000 one-token answers of one prompt: every token's count within five standard deviations."""
    drawn = np.concatenate([answer.token_ids for answer in rolled[0]["many"]])
    probs = np.exp(processed_logprobs(reference[models[0]](PROMPTS[0][1])[-1:], vllm_ranks.spec()))[0]
    counts = np.bincount(drawn, minlength=VOCAB)
    sigma = np.sqrt(len(drawn) * probs * (1 - probs))
    assert np.all(np.abs(counts - len(drawn) * probs) < 5 * sigma + 2)


def test_eos_stops_and_is_kept_and_length_limits(rolled: list[dict[str, Any]]) -> None:
    answers: list[Completion] = rolled[0]["samples"]["stopping"][0]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        eos = [token in EOS for token in answer.token_ids.tolist()]
        if answer.finish_reason == "stop":
            assert eos[-1] and not any(eos[:-1])
        else:
            assert not any(eos) and len(answer.token_ids) == 64
    ignoring: list[Completion] = rolled[0]["samples"]["plain"][0]
    assert {(len(answer.token_ids), answer.finish_reason) for answer in ignoring} == {(16, "length")}


def test_experts_of_every_token_also_of_cached_prompts(rolled: list[dict[str, Any]], models: tuple[Path, Path]) -> None:
    """The 16 samples of a prompt share the blocks of 128 tokens that the first of them computed."""
    (answers, _), (of_second_rank, _) = (rank["samples"]["stopping"] for rank in rolled)
    prompts = dict(PROMPTS)
    assert max(map(len, prompts.values())) > 128
    assert_routed(models[0], [([*prompts[a.prompt_id], *a.token_ids], a.experts) for a in answers])
    assert all(answer.experts is None for answer in [*of_second_rank, *rolled[0]["samples"]["plain"][0]])


def test_tensor_parallel_ranks_sample_the_same_with_generators_apart(rolled: list[dict[str, Any]]) -> None:
    for name in SPECS:
        first, second = (rank["samples"][name] for rank in rolled)
        assert first[1] == second[1]
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first[0], second[0], strict=True))
    assert all(rank["restored"] for rank in rolled)


def test_tokens_depend_on_seed_and_prompt_alone(rolled: list[dict[str, Any]]) -> None:
    answers, digest = rolled[0]["samples"]["plain"]
    assert rolled[0]["again"] == rolled[0]["after_errors"] == rolled[0]["after_sleep"] == digest
    assert rolled[0]["other_seed"] != digest
    for batched, alone in zip(answers[:3], rolled[0]["alone"], strict=True):
        assert batched.token_ids.tolist() == alone.token_ids.tolist()
    for crowded, alone in zip(rolled[0]["crowded"], rolled[0]["alone"], strict=True):
        assert crowded.token_ids.tolist() == alone.token_ids.tolist()
    of_one_prompt = {tuple(answer.token_ids.tolist()) for answer in answers[:3]}
    assert len(of_one_prompt) == 3


def test_ranks_that_sample_apart_fail_together(rolled: list[dict[str, Any]]) -> None:
    for rank in rolled:
        assert "sampled different tokens" in rank["errors"]["ranks apart"]


def test_prompts_that_do_not_fit_are_refused_by_name(rolled: list[dict[str, Any]]) -> None:
    errors = rolled[1]["errors"]
    assert "prompt 41 has 241 tokens" in errors["too long"] and "1 to 240" in errors["too long"]
    assert "prompt 42 has 0 tokens" in errors["empty"]
    assert "prompt 43 has token 320" in errors["vocabulary"] and "0 to 319" in errors["vocabulary"]
    assert "rollout.stop" in errors["stop"]


def test_publishing_again_keeps_no_old_model(rolled: list[dict[str, Any]]) -> None:
    for rank in rolled:
        assert len(set(rank["modules"][1:])) == 1, rank["modules"]


def test_a_publish_writes_every_element_of_every_parameter_once(
    rolled: list[dict[str, Any]], models: tuple[Path, Path]
) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    specs = family_for(config).rollout_specs(config, 2, range(2), "float32")
    for rank, result in enumerate(rolled):
        writes = {name: np.zeros(shape, int) for name, shape in result["buffers"].items()}
        for shard in (shard for spec in specs for shard in spec.on(rank)):
            writes[shard.buffer][tuple(map(slice, shard.offset, shard.end))] += 1
        assert all((count == 1).all() for count in writes.values())


def largest_gap(samples: list[dict[str, Any]], logits: Logits) -> float:
    gaps = [
        np.abs(np.asarray(s["logprobs"]) - expected(logits, s["prompt"], s["tokens"], vllm_ranks.spec())).max()
        for s in samples
    ]
    return float(max(gaps))


def refit_gap(how: str, models: tuple[Path, Path], reference: dict[Path, Logits]) -> float:
    """Sampled-token logprobs after a change of all weights against Transformers', the prompts cached before it."""
    old, new = models
    ranks = run_ranks(f"{RANKS}:refit", 2, old=str(old), new=str(new), how=how, prompts=LONG_PROMPTS)
    for samples in ranks:
        assert all(sample["cached"] >= 128 for sample in samples["old"])  # the cache is on and in use
        assert largest_gap(samples["old"], reference[old]) < 1e-4
        assert largest_gap(samples["old"], reference[new]) > 0.5  # the models do differ
    return max(largest_gap(samples["new"], reference[new]) for samples in ranks)


def test_published_weights_generate(models: tuple[Path, Path], reference: dict[Path, Logits]) -> None:
    assert refit_gap("publish", models, reference) < 1e-4


def test_reload_weights_does_not_publish_on_cpu(models: tuple[Path, Path], reference: dict[Path, Logits]) -> None:
    """vLLM's own way fails the test above, which is why it is not used. Fails once vLLM has mended it."""
    assert refit_gap("reload_weights", models, reference) > 0.05


def check_recorded(result: dict[str, Any]) -> None:
    """What was recorded are the tokens and, bit for bit, the logprobs that vLLM returns itself. Each of our tokens is
    the one that its request's seed, its place in the answer and the distribution there give when it is drawn again in
    another batch; the same call again gives the same."""
    for run in result.values():
        for tokens, logprobs, (drawn, values) in zip(run["tokens"], run["logprobs"], run["recorded"], strict=True):
            assert drawn[: len(tokens)].tolist() == tokens and len(drawn) - len(tokens) in (0, 1)
            assert values[: len(tokens)].tolist() == logprobs
    for run in (result["ours"], result["again"]):
        assert all(at.tolist() == list(range(len(at))) for at in run["positions"])
        assert [drawn.tolist() for drawn, _ in run["recorded"]] == [drawn.tolist() for drawn in run["redrawn"]]
    assert result["ours"]["tokens"] == result["again"]["tokens"] != result["vllm's draws"]["tokens"]
    assert np.ptp(result["ours"]["distributions"][0], axis=-1).min() > 1  # nats: logits matter


def check_distributions(one: dict[str, Any], other: dict[str, Any], nats: float) -> None:
    """Two runs drew from the same distributions up to `nats` of rounding and a token at the edge of top-k or top-p, as
    far as the contexts are the same: up to where an answer first differs."""
    runs = (one["tokens"], other["tokens"], one["distributions"], other["distributions"])
    for tokens, others, left, right in zip(*runs, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens) - 1)
        left, right = left[: same + 1], right[: same + 1]
        assert (np.isfinite(left) != np.isfinite(right)).sum(-1).max() <= 1
        gaps = np.subtract(left, right, out=np.full_like(left, np.nan), where=np.isfinite(left) & np.isfinite(right))
        assert (np.nanmax(gaps, -1) - np.nanmin(gaps, -1)).max() < nats


@pytest.fixture(scope="module")
def exported(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old model again, by `rlhpc export` of what three ranks wrote in a run that began with the new one."""
    root = tmp_path_factory.mktemp("exported")
    run = write_run(root / "run", models[1])
    write_checkpoint(run, 1, read_tensors(models[0]))
    assert main(["export", str(run), str(root / "model"), "--shard-size", "500KB"]) == 0
    assert len(list((root / "model").glob("model-*.safetensors"))) > 5
    return root / "model"


def test_recorded_logprobs_are_vllms_own_however_it_schedules(models: tuple[Path, Path], exported: Path) -> None:
    """Prompts whole and in chunks of 48 tokens among running requests, and a KV cache of 8 blocks for 12 requests. The
    second engine loads what was exported: the same distributions."""
    common = {"device": "cpu", "dtype": "float32", "max_num_seqs": 12}
    [roomy] = run_ranks(f"{RANKS}:recorded", 1, model_dir=str(models[0]), num_blocks=None, **common)
    [tight] = run_ranks(
        f"{RANKS}:recorded", 1, model_dir=str(exported), num_blocks=9, max_num_batched_tokens=48, **common
    )
    check_recorded(roomy)
    check_recorded(tight)
    assert roomy["ours"]["preempted"] == 0 < tight["ours"]["preempted"]
    assert tight["ours"]["batches"] > 1.5 * roomy["ours"]["batches"]
    check_distributions(roomy["ours"], tight["ours"], nats=1e-4)
    assert tight["ours"]["tokens"] == roomy["ours"]["tokens"]  # neither scheduling nor export changes an answer
    for one in (roomy["ours"], tight["ours"]):
        asked = zip(one["prompts"], one["tokens"], one["experts"], strict=True)
        assert_routed(models[0], [([*prompt, *tokens], experts) for (_, prompt), tokens, experts in asked])
    lengths = {len(tokens) for tokens in roomy["ours"]["tokens"]}
    assert 61 in lengths and len(lengths) > 1  # some were stopped


def test_a_second_start_finds_what_the_first_compiled(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    arguments = {"model_dir": str(models[0]), "temp_root": str(tmp_path)}
    [first] = run_ranks(f"{RANKS}:kept", 1, fresh=True, **arguments)
    [second] = run_ranks(f"{RANKS}:kept", 1, fresh=True, **arguments)
    assert second == first
    folders = {tuple(name.split("/")[:2]) for name in first}
    private = f"rlhpc-{os.getuid()}-compiled"
    assert folders == {(private, "vllm"), (private, "inductor")}  # Triton compiles nothing for a CPU


def test_stop_strings(models: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[0])
    prompts = [(i, tokenizer.encode(text)) for i, text in enumerate(("12+30=", "What is the sum?", "one two three"))]
    [answers] = run_ranks(f"{RANKS}:stop_strings", 1, model_dir=str(models[0]), prompts=prompts, stop="e")
    stopped = 0
    for answer in answers:
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if answer.finish_reason == "stop" and int(answer.token_ids[-1]) not in EOS:
            assert "e" in text and "e" not in tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True)
            stopped += 1
        elif answer.finish_reason == "length":
            assert "e" not in text
    assert stopped


def test_a_crashed_start_does_not_stop_the_next_and_nothing_stays(models: tuple[Path, Path]) -> None:
    ident = f"rlhpccrash{os.getpid()}"
    arguments = {"model_dir": str(models[0]), "ident": ident}
    try:
        with pytest.raises(RuntimeError, match=f"exit -{int(signal.SIGKILL)}"):
            run_ranks(f"{RANKS}:crash_while_starting", 2, **arguments)
        left = vllm_ranks.segments(ident)
        assert len([name for name in left if name.startswith(f"{ident}-tp:0-[0-1]")]) == len(left) == 2
        ranks = run_ranks(f"{RANKS}:replicas", 4, **arguments, prompts=PROMPTS, kill=False)
        assert any(rank["left_by_crash"] == left for rank in ranks)
        assert all(rank["while_running"] == rank["after_close"] == [] for rank in ranks)
        assert [rank["replica"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert [rank["world"] for rank in ranks] == [4] * 4
        digests = [rank["digest"] for rank in ranks]
        assert digests[0] == digests[1] != digests[2] == digests[3]
        asked = [{answer.prompt_id for answer in rank["samples"]} for rank in ranks[::2]]
        assert asked == [{100, 102, 104}, {101, 103, 105}]
    finally:
        cleanup_shm(ident)


def test_a_kill_leaves_nothing(models: tuple[Path, Path]) -> None:
    ident = f"rlhpckill{os.getpid()}"
    with pytest.raises(RuntimeError, match=f"exit -{int(signal.SIGKILL)}"):
        run_ranks(f"{RANKS}:replicas", 2, model_dir=str(models[0]), ident=ident, prompts=PROMPTS, kill=True)
    assert vllm_ranks.segments(ident) == []

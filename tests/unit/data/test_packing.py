import math
import pickle
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.data.packing import TokenSequence, pack, split_by_sequence, unpack
from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.errors import ConfigError


def sequence(sequence_id, num_tokens, prompt_len=1, **fields):
    tokens = 1000 * sequence_id + np.arange(num_tokens)
    return TokenSequence(sequence_id, tokens.astype(np.int32), prompt_len, fields)


def test_two_sequences_in_one_microbatch_by_hand():
    first = TokenSequence(0, np.array([5, 6, 7, 8]), 2, {"advantage": np.array([0.5, -1.0], np.float32)})
    second = TokenSequence(1, np.array([9, 10, 11]), 1, {"advantage": np.array([2.0, 3.0], np.float32)})
    [[batch]] = pack([second, first], dp_size=1, max_tokens=8)
    order = batch.sequence_ids.tolist()
    assert order == [1, 0]  # the order given
    assert batch.input_ids.tolist() == [9, 10, 11, 5, 6, 7, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.prompt_lens.tolist() == [1, 2]
    # Position 0 predicts 10, 1 predicts 11; 2 would cross into another sequence; 4 predicts 7, 5 predicts 8.
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 1, 1, 0]
    assert batch.token_fields["advantage"].tolist() == [2, 3, 0, 0, 0.5, -1, 0]
    assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == batch.prompt_lens.dtype == torch.int32

    values = torch.tensor([10.0, 11, 12, 13, 14, 15, 16])
    mask, padded = unpack(batch, values)
    assert padded.tolist() == [[10, 11], [14, 15]] and mask.tolist() == [[1, 1], [1, 1]]
    assert {key: part.tolist() for key, part in split_by_sequence(values, batch).items()} == {
        1: [10, 11],
        0: [14, 15],
    }


def test_a_batch_travels_as_arrays_and_arrives_as_it_was():
    advantages = np.array([0.5, -1.0], np.float32)
    [[batch]] = pack([TokenSequence(0, np.array([5, 6, 7, 8]), 2, {"advantages": advantages})], dp_size=1, max_tokens=8)
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    assert len(buffers) == 7  # each tensor's memory, untouched
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a tensor over memory that can't be written to
        arrived = pickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])
    for name, value in (vars(batch) | batch.token_fields).items():
        if isinstance(value, torch.Tensor):
            received = arrived.token_fields[name] if name in batch.token_fields else getattr(arrived, name)
            assert received.dtype == value.dtype and torch.equal(received, value), name


def test_unpack_pads_short_rows_and_keeps_padding_out_of_the_gradient():
    [[batch]] = pack([sequence(0, 4, 2), sequence(1, 2, 1), sequence(2, 3, 3)], dp_size=1, max_tokens=9)
    values = torch.tensor([math.nan, 1, 2, math.nan, 4, math.inf, 6, 7, 8], requires_grad=True)
    mask, padded = unpack(batch, values)
    assert padded.tolist() == [[1, 2], [4, 0], [0, 0]] and mask.tolist() == [[1, 1], [1, 0], [0, 0]]
    (padded * torch.tensor([[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]])).sum().backward()
    assert values.grad.tolist() == [0, 2, 3, 0, 5, 0, 0, 0, 0]


def test_no_response_at_all_unpacks_to_one_masked_column():
    [[batch]] = pack([sequence(0, 2, 2)], dp_size=1, max_tokens=2)
    mask, padded = unpack(batch, torch.ones(2, requires_grad=True))
    assert padded.tolist() == [[0.0]] and mask.tolist() == [[0.0]]
    padded.sum().backward()


def test_distribution_by_hand():
    # 8+1 and 5+4: two ranks, 9 tokens each, one microbatch each.
    ranks = pack([sequence(i, n) for i, n in enumerate([8, 5, 4, 1])], dp_size=2, max_tokens=9)
    assert sorted(sorted(b.sequence_ids.tolist()) for rank in ranks for b in rank) == [[0, 3], [1, 2]]
    assert [len(rank) for rank in ranks] == [1, 1]


def test_budget_sets_the_number_of_microbatches():
    ranks = pack([sequence(i, 10) for i in range(8)], dp_size=2, max_tokens=20)
    assert [[b.num_tokens for b in rank] for rank in ranks] == [[20, 20], [20, 20]]
    ranks = pack([sequence(i, 10) for i in range(8)], dp_size=2, max_tokens=19)
    assert [[b.num_tokens for b in rank] for rank in ranks] == [[10] * 4] * 2


def test_microbatch_size_limits_sequences():
    ranks = pack([sequence(i, 10 + i) for i in range(12)], dp_size=2, max_tokens=1000, max_sequences=2)
    assert [[b.num_sequences for b in rank] for rank in ranks] == [[2, 2, 2], [2, 2, 2]]
    lengths = [100, 1, 1, 1, 1, 1]  # costs alone would put the five short ones together
    [rank] = pack([sequence(i, n) for i, n in enumerate(lengths)], dp_size=1, max_tokens=200, max_sequences=3)
    assert [b.num_sequences for b in rank] == [3, 3]


def test_uneven_microbatches_even_out_over_the_ranks():
    # Index 0 is 10 | 9; then the rank that is behind takes the larger of 5 and 1: 11 | 14, not 15 | 10.
    ranks = pack([sequence(i, n) for i, n in enumerate([10, 9, 5, 1])], dp_size=2, max_tokens=10)
    assert [[b.num_tokens for b in rank] for rank in ranks] == [[10, 1], [9, 5]]


def test_a_filler_takes_the_place_that_no_sequence_can():
    sequences = [sequence(i, 10, 2, x=np.ones(8, np.float32)) for i in range(3)]
    ranks = pack(sequences, dp_size=2, max_tokens=10)
    assert [len(rank) for rank in ranks] == [2, 2]
    [filler] = [b for rank in ranks for b in rank if -1 in b.sequence_ids.tolist()]
    assert filler.input_ids.tolist() == [0, 1] and filler.loss_mask.tolist() == [0, 0]
    assert filler.token_fields["x"].tolist() == [0, 0]
    assert split_by_sequence(torch.ones(2), filler) == {}


def test_experts_go_with_their_tokens_and_through_a_pickle():
    """Of the last token of a sequence there are none; a filler has those of its tokens."""
    made = []
    for i, length in enumerate((3, 2, 4)):
        experts = np.arange(2 * (length - 1), dtype=np.int16).reshape(-1, 1, 2) + 100 * (i + 1)
        made.append(TokenSequence(i, np.arange(length, dtype=np.int32), 1, experts=experts))
    ranks = pack(made, dp_size=2, max_tokens=4)
    wanted = {
        0: [[100, 101], [102, 103], [0, 0]], 1: [[200, 201], [0, 0]], 2: [[300, 301], [302, 303], [304, 305], [0, 0]],
        -1: [[100, 101], [0, 0]],
    }  # fmt: skip
    for batch in (batch for rank in ranks for batch in rank):
        again = pickle.loads(pickle.dumps(batch))
        assert again.experts.dtype == torch.int16 and torch.equal(again.experts, batch.experts)
        assert batch.experts[:, 0].tolist() == [row for i in batch.sequence_ids.tolist() for row in wanted[i]]
    assert {i for rank in ranks for batch in rank for i in batch.sequence_ids.tolist()} == {-1, 0, 1, 2}
    plain = pack([sequence(0, 3)], dp_size=1, max_tokens=4)[0][0]
    assert pickle.loads(pickle.dumps(plain)).experts is None


def test_attention_cost_pairs_long_sequences_with_fewer_tokens():
    # Tokens alone: 8 | 4+4. With quadratic_tokens=4 a length L costs L + L^2/4: 8 -> 24, 4 -> 8, 1 -> 1.25.
    lengths = [8, 4, 4, 1, 1, 1, 1]
    tokens = pack([sequence(i, n) for i, n in enumerate(lengths)], dp_size=2, max_tokens=100)
    flops = pack([sequence(i, n) for i, n in enumerate(lengths)], dp_size=2, max_tokens=100, quadratic_tokens=4)
    assert sorted(rank[0].num_tokens for rank in tokens) == [10, 10]
    assert sorted(rank[0].num_tokens for rank in flops) == [8, 12]


def test_errors_name_value_limit_and_fix():
    with pytest.raises(ConfigError, match=r"sequence 7 has 12 tokens.*is 10.*ppo_max_token_len_per_gpu"):
        pack([sequence(7, 12)], dp_size=1, max_tokens=10)
    with pytest.raises(ConfigError, match=r"1 sequences can't feed dp_size=2.*train_batch_size"):
        pack([sequence(0, 3)], dp_size=2, max_tokens=10)
    with pytest.raises(ConfigError, match="micro batch size 0"):
        pack([sequence(0, 3)], dp_size=1, max_tokens=10, max_sequences=0)


def test_sequence_of_a_trajectory():
    prompt = Prompt(3, "ab", np.array([1, 2], np.int32), "4", "arithmetic")
    experts = np.zeros((4, 3, 2), np.uint8)
    completion = Completion(3, 0, np.array([7, 8, 9], np.int32), np.zeros(3, np.float32), "stop", experts)
    made = TokenSequence.of(5, Trajectory(prompt, completion, "", 1.0, "ok"))
    assert (made.sequence_id, made.token_ids.tolist(), made.prompt_len) == (5, [1, 2, 7, 8, 9], 2)
    assert made.experts is None
    assert TokenSequence.of(5, Trajectory(prompt, completion, "", 1.0, "ok"), experts=experts).experts is experts


@st.composite
def workloads(draw):
    dp_size = draw(st.integers(1, 5))
    max_tokens = draw(st.integers(2, 40))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=dp_size, max_size=40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sequences = []
    for i, length in enumerate(lengths):
        prompt_len = int(rng.integers(1, length + 1))
        sequences.append(sequence(i, length, prompt_len, reward=rng.random(length - prompt_len).astype(np.float32)))
    max_sequences = draw(st.none() | st.integers(1, 6))
    return sequences, {"dp_size": dp_size, "max_tokens": max_tokens, "max_sequences": max_sequences}


@settings(deadline=None, max_examples=200)
@given(workloads())
def test_every_packing_keeps_its_promises(workload):
    sequences, options = workload
    ranks = pack(sequences, **options)
    assert len(ranks) == options["dp_size"] and len({len(rank) for rank in ranks}) == 1
    seen = {}
    for batch in (batch for rank in ranks for batch in rank):
        assert 1 <= batch.num_tokens <= options["max_tokens"]
        assert batch.num_sequences <= (options["max_sequences"] or 10**9)
        mask, padded = unpack(batch, batch.token_fields["reward"])
        by_id = split_by_sequence(batch.token_fields["reward"], batch)
        offsets = batch.cu_seqlens.tolist()
        for row, key in enumerate(batch.sequence_ids.tolist()):
            if key == -1:
                continue
            tokens = batch.input_ids[offsets[row] : offsets[row + 1]]
            seen[key] = (tokens.tolist(), batch.prompt_lens[row].item(), by_id[key].tolist())
            assert padded[row][mask[row].bool()].tolist() == by_id[key].tolist()
    assert seen == {s.sequence_id: (s.token_ids.tolist(), s.prompt_len, s.fields["reward"].tolist()) for s in sequences}
    repeated = pack(sequences, **options)
    assert [[b.sequence_ids.tolist() for b in rank] for rank in repeated] == [
        [b.sequence_ids.tolist() for b in rank] for rank in ranks
    ]


def test_realistic_step_is_even_tight_and_fast():
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6, 0.8, 8192), 64, 4096).astype(int)
    sequences = [sequence(i, int(n), 16) for i, n in enumerate(lengths)]
    start = time.process_time()
    ranks = pack(sequences, dp_size=8, max_tokens=16384)
    assert time.process_time() - start < 2.0
    totals = [sum(b.num_tokens for b in rank) for rank in ranks]
    assert max(totals) / min(totals) < 1.001
    assert len(ranks[0]) <= math.ceil(lengths.sum() / 8 / 16384) + 1
    for index in range(len(ranks[0])):
        tokens = [rank[index].num_tokens for rank in ranks]
        assert max(tokens) / min(tokens) < 1.01


def test_awkward_lengths_need_no_long_search():
    sequences = [sequence(i, 401) for i in range(2000)]  # two fit into 1000, by total it would be 2.5
    start = time.process_time()
    ranks = pack(sequences, dp_size=2, max_tokens=1000)
    assert len(ranks[0]) == 500 and time.process_time() - start < 2.0

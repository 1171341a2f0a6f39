"""Batches for training: packed whole, seeded, the same in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.bench.demo_pack.data.stream import LENGTHS, NO_TASK, Batch, MixedStream, Stream
from strata.bench.demo_pack.tokenizer import N_TOKENS, vocabulary


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=8, deadline=None)
@given(context=st.sampled_from([256, 512, 1024, 2048]), rows=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_conversation_is_never_cut_and_never_runs_into_another(context: int, rows: int, seed: int) -> None:
    start, end = (vocabulary().special[word] for word in ("<|im_start|>", "<|endoftext|>"))
    ids, mask, segment, task = Stream(context, rows, seed).batch(0)
    assert ids.shape == mask.shape == segment.shape == task.shape == (rows, context)
    assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < N_TOKENS
    for row in range(rows):
        used = int((segment[row] >= 0).sum())
        assert (segment[row, used:] == -1).all() and (ids[row, used:] == end).all() and not mask[row, used:].any()
        assert ((task[row] == NO_TASK) == (segment[row] == -1)).all()
        for number in range(segment[row].max() + 1):
            (at,) = np.nonzero(segment[row] == number)
            assert (np.diff(at) == 1).all()
            assert ids[row, at[0]] == start and ids[row, at[-1]] == end
            assert not mask[row, at[0]] and not mask[row, at[-1]] and mask[row, at].any()
            assert len(set(task[row, at])) == 1


def test_a_batch_depends_on_its_index_alone() -> None:
    stream = Stream(512, 2, seed=3)
    third = next(stream.batches(start=3, step=8))
    assert same(third, Stream(512, 2, seed=3).batch(3))
    assert not same(third, stream.batch(4))
    assert not same(third, Stream(512, 2, seed=4).batch(3))


def test_training_and_held_out_batches_differ() -> None:
    assert not same(Stream(512, 2, seed=3).batch(0), Stream(512, 2, seed=3, split="test").batch(0))


def test_a_mixed_stream_has_every_length() -> None:
    stream = MixedStream(tokens=4608, seed=1)
    batches = [stream.batch(i) for i in range(24)]
    assert {batch.ids.shape[1] for batch in batches} == {context for context, _ in LENGTHS}
    assert same(stream.batch(5), batches[5])


def test_little_of_a_batch_is_padding() -> None:
    batch = Stream(1024, 16, seed=0).batch(0)
    assert (batch.segment < 0).mean() < 0.05


def test_a_context_too_short_for_a_conversation_is_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        Stream(64, 1, seed=0)

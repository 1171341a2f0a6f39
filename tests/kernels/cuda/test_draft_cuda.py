"""Drafts on a card: the likeliest token and how likely it is, against the plain form."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda.draft import draft_tokens, keep_rows, likeliest
from strata.kernels.reference import draft as reference


def run(target, logits, names=None, step=None):
    n = len(logits)
    ids, p = target.put(np.full(n, -7, np.int32)), target.put(np.full(n, np.nan, np.float32))
    likeliest(target.workspace(), target.put(logits), ids, p, None if names is None else target.put(names), step)
    return target.host(ids), target.host(p)


@pytest.mark.parametrize("vocab", [1, 31, 1024, 5003])
@pytest.mark.parametrize("n", [1, 8])
def test_the_likeliest_token_is_that_of_the_plain_form(target, n, vocab):
    rng = np.random.default_rng(vocab)
    logits = (3 * rng.standard_normal((n, vocab))).astype(np.float32)
    ids, p = run(target, logits)
    wanted, likely = reference.likeliest(logits)
    assert ids.tolist() == wanted.tolist()
    assert np.allclose(p, likely, rtol=1e-5)


def test_of_equal_logits_the_lower_id_is_drafted(target):
    logits = np.zeros((1, 1000), np.float32)
    logits[0, [900, 40, 41, 999]] = 2.0
    assert run(target, logits)[0].tolist() == [40]


def test_what_is_not_a_number_is_never_drafted(target):
    logits = np.full((2, 100), np.nan, np.float32)
    logits[0, [70, 80]] = -5.0, -4.0
    ids, p = run(target, logits)
    assert ids.tolist() == [80, 0]
    assert p[1] == 0.0


def test_a_draft_of_a_part_of_the_vocabulary_is_called_by_its_name(target):
    logits = np.array([[0.0, 4.0, 1.0]], np.float32)
    assert run(target, logits, names=np.array([7, 90, 3], np.int32))[0].tolist() == [90]


def test_a_draft_is_the_next_token_one_position_on(target):
    tokens, positions = target.put(np.array([5, 6], np.int32)), target.put(np.array([10, 63], np.int32))
    logits = np.zeros((2, 64), np.float32)
    logits[0, 9] = logits[1, 33] = 1.0
    run(target, logits, step=(tokens, positions))
    assert target.host(tokens).tolist() == [9, 33]
    assert target.host(positions).tolist() == [11, 64]


def test_a_row_without_an_id_embeds_token_0(target):
    tokens = target.put(np.full(3, 9, np.int32))
    draft_tokens(target.put(np.array([4, -1, 0], np.int32)), tokens)
    assert target.host(tokens).tolist() == [4, 0, 0]


def test_kept_rows_are_those_that_were_given(target):
    rows = np.random.default_rng(1).standard_normal((3, 4, 132)).astype(np.float32)
    kept = target.put(np.full(rows.shape, np.nan, np.float32))
    keep_rows(target.put(rows), kept)
    assert np.array_equal(target.host(kept), rows)
    with pytest.raises(ValueError, match="multiple of 4 elements, got 3"):
        keep_rows(target.put(np.zeros(3, np.float32)), target.put(np.zeros(3, np.float32)))

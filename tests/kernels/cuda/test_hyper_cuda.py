"""Hyper-connections on a card: the bits of the host's, in batches, and fused with the add before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import few_plans, forms, hyper, hyper_window, product
from strata.kernels.cuda.hyper import MOST_WORDS, hyper_add, hyper_mix
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.formats import BY_NAME, CARD_FORMS, Weight
from strata.kernels.ops import Hyper
from strata.kernels.reference.repack import repack

EPS = 1e-6
SIZES = [(1, 4, 192, 32, "Q8_0"), (5, 2, 64, 64, "Q4_0"), (20, 4, 96, 32, "F32")]
WINDOWS = [
    (1, 4, 96, 320, "Q8_0"),
    (8, 2, 64, 160, "Q5_1"),
    (9, 2, 64, 160, "Q5_1"),
    (16, 4, 32, 64, "Q2_0"),
    (3, 4, 64, 288, "IQ4_NL"),
]


def case(random_weight: Callable[..., Weight], c: int, h: int, r: int, kind: str, inject: bool) -> Hyper:
    rng = np.random.default_rng(c * h)
    return Hyper(
        norm=1 + 0.1 * rng.standard_normal((c, h)).astype(np.float32),
        down=random_weight(kind, r, c * h),
        up=random_weight(kind, c * h, r),
        inject=random_weight("F32", c, c * h) if inject else None,
    )


def streams(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize(("n", "c", "h", "r", "kind"), SIZES + WINDOWS)
def test_mix_gives_the_bits_of_the_host(target, same_bits, random_weight, n, c, h, r, kind, inject):
    hc, x = case(random_weight, c, h, r, kind, inject), streams(n, c, h)
    u, beta = hyper_mix(target.workspace(), target.put(x), target.put(hc), EPS, rows_at_once=64)
    want_u, want_beta = cpu.hyper_mix(x, hc, EPS)
    same_bits(target.host(u), want_u)
    if not inject:
        assert beta is None and want_beta is None
        return
    same_bits(target.host(beta), want_beta)


def test_rows_in_batches_are_the_rows_at_once(target, same_bits, random_weight):
    hc, x = target.put(case(random_weight, 2, 64, 32, "Q8_0", True)), target.put(streams(9, 2, 64))
    space = target.workspace()
    whole, parts = (hyper_mix(space, x, hc, EPS, rows_at_once=rows) for rows in (9, 4))
    for a, b in zip(whole, parts, strict=True):
        same_bits(target.host(a), target.host(b))


def test_mix_with_what_was_added_is_add_then_mix(target, same_bits, random_weight):
    hc = target.put(case(random_weight, 4, 64, 32, "Q8_0", True))
    y, beta = target.put(streams(3, 64)), target.put(streams(3, 4))
    x, other = target.put(streams(3, 4, 64)), target.put(streams(3, 4, 64))
    space = target.workspace()
    hyper_add(x, beta, y)
    apart = hyper_mix(space, x, hc, EPS, 64)
    fused = hyper_mix(space, other, hc, EPS, 64, (beta, y))
    same_bits(target.host(other), target.host(x))
    for a, b in zip(apart, fused, strict=True):
        same_bits(target.host(a), target.host(b))


def test_add_gives_the_bits_of_the_host(target, same_bits):
    x, beta, y = streams(5, 3, 36), streams(5, 3), streams(5, 36)
    moved = target.put(x)
    hyper_add(moved, target.put(beta), target.put(y))
    cpu.hyper_add(x, beta, y)
    same_bits(target.host(moved), x)


def test_a_width_that_cannot_be_read_four_at_a_time_is_refused(target):
    x, beta, y = (target.put(streams(*shape)) for shape in ((2, 3, 10), (2, 3), (2, 10)))
    with pytest.raises(ValueError, match="H must be a multiple of 4, got 10"):
        hyper_add(x, beta, y)


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("n", "c", "h", "r", "kind"),
    [(1, 4, 256, 70, "Q6_K"), (1, 4, 2560, 10, "Q6_K"), (1, 4, 128, 32, "Q5_1"), (1, 2, 128, 32, "Q4_0"),
     (2, 4, 128, 33, "Q6_K"), (8, 2, 256, 9, "Q5_K"), (5, 4, 128, 10, "Q2_0"), (10, 4, 128, 33, "Q4_0"),
     (4, 4, 640, 9, "Q2_K")],
)  # fmt: skip
def test_a_windows_mix_in_few_launches_is_add_then_mix(
    target, same_bits, random_weight, n, c, h, r, kind, added, inject
):
    hc = case(random_weight, c, h, -(-r // 32) * 32, "Q8_0", inject)
    hc = replace(hc, down=random_weight(kind, hc.up.cols, c * h))
    x, y, beta = streams(n, c, h), streams(n, h), streams(n, c)
    on_device = target.put(x)
    before = (target.put(beta), target.put(y)) if added else None
    assert hyper_window.takes(target.put(hc), n, c, h) and hyper_window._down_rows(hc.down, n, h)
    u, made = hyper_mix(target.workspace(16), on_device, target.put(hc), EPS, 64, before)
    if added:
        cpu.hyper_add(x, beta, y)
    want, want_beta = cpu.hyper_mix(x, hc, EPS)
    same_bits(target.host(u), want)
    same_bits(target.host(on_device), x)
    if inject:
        same_bits(target.host(made), want_beta)


def same_as_the_host(target, same_bits, hc: Hyper, n: int, c: int, h: int, words: bool = False) -> None:
    x, y, beta = streams(n, c, h), streams(n, h), streams(n, c)
    on_device, before = target.put(x), (target.put(beta), target.put(y))
    place = target.put(np.zeros(MOST_WORDS, np.float32)) if words else None
    u, made = hyper_mix(target.workspace(64 if n > 64 else 32), on_device, target.put(hc), EPS, 512, before, place)
    cpu.hyper_add(x, beta, y)
    want, want_beta = cpu.hyper_mix(x, hc, EPS)
    same_bits(target.host(u), want)
    same_bits(target.host(on_device), x)
    same_bits(target.host(made), want_beta)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    ("n", "c", "h", "r", "kind", "parts"),
    [(1, 4, 2560, 320, "Q6_K", 4), (2, 4, 2560, 320, "Q6_K", 4), (8, 4, 2560, 32, "Q5_K", 4),
     (16, 4, 2560, 320, "Q6_K", 4), (1, 4, 1280, 32, "Q5_K", 2), (3, 4, 1280, 32, "Q8_0", 2),
     (9, 4, 1408, 32, "Q6_K", 1), (1, 4, 768, 32, "Q6_K", 0), (5, 4, 768, 32, "Q6_K", 0), (2, 2, 2816, 32, "Q6_K", 2),
     (3, 2, 1280, 32, "IQ3_S", 1), (2, 4, 1280, 32, "IQ3_S", 2), (1, 4, 2560, 32, "F16", 1)],
)  # fmt: skip
def test_parts_of_a_row_of_down_are_added_in_their_order_in_a_window(
    target, same_bits, random_weight, n, c, h, r, kind, parts, words
):
    hc = case(random_weight, c, h, r, "Q8_0", inject=True)
    hc = replace(hc, down=random_weight(kind, r, c * h))
    assert hyper_window.parts(hc.down, c) == parts and hyper_window.takes(hc, n, c, h)
    same_as_the_host(target, same_bits, hc, n, c, h, words)


@pytest.mark.parametrize(
    ("n", "c", "h", "kind", "parts"),
    [(40, 4, 2560, "Q6_K", 4), (300, 4, 2560, "Q6_K", 4), (40, 4, 1280, "Q5_K", 2), (40, 4, 1280, "Q8_0", 2),
     (20, 4, 2816, "Q6_K", 4), (40, 4, 768, "Q6_K", 0), (17, 3, 1280, "Q4_K", 0), (40, 4, 2560, "F16", 1)],
)  # fmt: skip
def test_parts_of_a_row_of_down_are_added_in_their_order_in_a_prompt(
    target, same_bits, random_weight, monkeypatch, n, c, h, kind, parts
):
    hc = case(random_weight, c, h, 32, "Q8_0", inject=True)
    hc = replace(hc, down=random_weight(kind, 32, c * h))
    assert hyper_window.parts(hc.down, c) == parts and hyper._quantises(hc, n, h) == (parts > 0 and kind != "F16")
    same_as_the_host(target, same_bits, hc, n, c, h)
    if parts > 1:  # product_prompt.cu, and not prompt_few.cu
        monkeypatch.setattr(few_plans, "MOST_ROWS", 0)
        same_as_the_host(target, same_bits, hc, n, c, h)


@pytest.mark.parametrize("n", [1, 3])
def test_down_in_the_cards_form_gives_the_bits_of_the_file(target, same_bits, random_weight, n):
    hc, form = case(random_weight, 4, 256, 64, "Q8_0", True), CARD_FORMS["Q6_K"]
    file = random_weight("Q6_K", 64, 4 * 256)
    downs = (file, Weight(form, file.shape, repack(file.type, file.data)))
    x = target.put(streams(n, 4, 256))
    mixed = [hyper_mix(target.workspace(16), x, target.put(replace(hc, down=down)), EPS, 64) for down in downs]
    for got, want in zip(*mixed, strict=True):
        same_bits(target.host(got), target.host(want))


@pytest.mark.parametrize(("n", "added"), [(1, True), (1, False), (3, True), (9, False)])
def test_mixes_whose_kernels_work_beside_each_other_never_see_the_numbers_of_the_mix_before(
    target, same_bits, random_weight, n, added
):
    hc = case(random_weight, 4, 128, 64, "Q8_0", True)
    chain = [target.put(replace(hc, norm=hc.norm * factor)) for factor in np.float32([1, 2])] * 6
    block = target.put(random_weight("Q8_0", 128, 128))
    words = target.put(np.zeros(MOST_WORDS, np.float32))
    results = []
    for place in (None, words):
        space, x, made = target.workspace(16), target.put(streams(n, 4, 128)), []
        beta, y = target.put(streams(n, 4)), target.put(streams(n, 128))
        for hc in chain:
            u, beta = hyper_mix(space, x, hc, EPS, 64, (beta, y) if added else None, place)
            (y,) = product.linear(space, [block], u)
            made += [u, beta]
        results.append([target.host(a) for a in (*made, x)])
    for got, want in zip(*results, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("h", [640, 1280, 2560])
def test_columns_that_the_warps_of_a_block_take_in_turn_are_added_in_their_order(
    target, same_bits, random_weight, monkeypatch, h
):
    monkeypatch.setattr(hyper_window, "_DOWN_WORKERS", 2)
    hc = case(random_weight, 4, h, 32, "Q8_0", inject=False)  # h = 640: 80 spans, two turns, the second of half a warp
    hc, x = replace(hc, down=random_weight("Q6_K", 32, 4 * h)), streams(3, 4, h)
    u, _ = hyper_mix(target.workspace(16), target.put(x), target.put(hc), EPS, 64)
    same_bits(target.host(u), cpu.hyper_mix(x, hc, EPS)[0])


@pytest.mark.parametrize("kind", ["Q6_K", "Q2_K", "Q4_K", "IQ3_S", "Q4_0", "Q2_0"])
def test_what_a_windows_mix_leaves_for_products_is_its_result_quantised(target, same_bits, random_weight, kind):
    space, hc = target.workspace(16), target.put(case(random_weight, 4, 64, 32, "Q8_0", True))
    u, _ = hyper_mix(space, target.put(streams(3, 4, 64)), hc, EPS, 64)
    type_ = BY_NAME[kind]
    known, want = forms.known(space, u, type_), product.quantize(space, u, type_)
    for got, wanted in ((known.q, want.q), (known.d, want.d), (known.sums, want.sums)):
        assert (got is None) == (wanted is None)
        if got is not None:
            same_bits(target.host(got), target.host(wanted))
    assert forms.known(space, u[:2], type_) is None
    space.release(0)
    assert forms.known(space, u, type_) is None


def test_what_a_prompts_mix_leaves_for_products_is_its_result_quantised(target, same_bits, random_weight):
    space, hc = target.workspace(16), target.put(case(random_weight, 4, 256, 32, "Q8_0", True))
    u, _ = hyper_mix(space, target.put(streams(20, 4, 256)), hc, EPS, 64)
    known, want = forms.known(space, u, BY_NAME["Q6_K"]), product.quantize(space, u, BY_NAME["Q6_K"])
    assert known is not None
    same_bits(target.host(known.q), target.host(want.q))
    same_bits(target.host(known.d), target.host(want.d))
    assert forms.known(space, u, BY_NAME["IQ3_S"]) is None and forms.known(space, u, BY_NAME["Q4_K"]) is None


@pytest.mark.parametrize("n", [1, 3])
def test_products_of_a_mix_have_the_bits_of_products_of_its_numbers(target, same_bits, random_weight, n):
    space, hc = target.workspace(16), target.put(case(random_weight, 4, 64, 32, "Q8_0", True))
    weights = [target.put(random_weight(kind, 24, 64)) for kind in ("Q8_0", "Q4_1", "IQ4_NL")]
    u, _ = hyper_mix(space, target.put(streams(n, 4, 64)), hc, EPS, 64)
    same = target.put(target.host(u))  # nobody knows anything of it
    for got, want in zip(product.linear(space, weights, u), product.linear(space, weights, same), strict=True):
        same_bits(target.host(got), target.host(want))


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(
    ("n", "c", "h", "kind"),
    [(17, 4, 128, "Q6_K"), (20, 2, 256, "Q5_K"), (33, 4, 640, "Q2_K"), (18, 2, 128, "IQ3_S"), (19, 2, 128, "Q2_0")],
)
def test_a_prompts_mix_without_normed_streams_is_add_then_mix(
    target, same_bits, random_weight, n, c, h, kind, added, inject
):
    hc = case(random_weight, c, h, 32, "Q8_0", inject)
    hc = replace(hc, down=random_weight(kind, 32, c * h))
    x, y, beta = streams(n, c, h), streams(n, h), streams(n, c)
    x[:, 0, :32] = 0
    on_device = target.put(x)
    before = (target.put(beta), target.put(y)) if added else None
    u, made = hyper_mix(target.workspace(16), on_device, target.put(hc), EPS, 64, before)
    if added:
        cpu.hyper_add(x, beta, y)
    want, want_beta = cpu.hyper_mix(x, hc, EPS)
    same_bits(target.host(u), want)
    same_bits(target.host(on_device), x)
    if inject:
        same_bits(target.host(made), want_beta)


@pytest.mark.parametrize(("n", "c", "h", "kind", "added"), [(77, 4, 128, "Q6_K", True), (51, 2, 256, "Q5_K", False)])
def test_teams_that_share_the_weights_of_a_mix_give_the_bits_of_blocks_of_one(
    target, same_bits, random_weight, monkeypatch, n, c, h, kind, added
):
    hc = case(random_weight, c, h, 32, "Q8_0", True)
    hc = target.put(replace(hc, down=random_weight(kind, 32, c * h)))
    y, beta = target.put(streams(n, h)), target.put(streams(n, c))
    results = []
    for fewest, teams in ((n, 0), (0, 4)):
        monkeypatch.setattr(hyper, "_FEWEST_ROWS", fewest)
        assert hyper.teams_of_a_block(cards.card(), n, c, h, injects=True)[0] == teams
        x = target.put(streams(n, c, h))
        made = hyper_mix(target.workspace(16), x, hc, EPS, 256, (beta, y) if added else None)
        results.append([target.host(a) for a in (x, *made)])
    for got, want in zip(*results, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("arch", CARDS)
def test_weights_of_a_mix_that_no_block_has_room_for_stay_where_they_are(arch):
    card = CARDS[arch]
    assert hyper.teams_of_a_block(card, 8192, 4, 2560, injects=True) == ((4, 204_800) if arch == 90 else (0, 0))
    assert hyper.teams_of_a_block(card, 8192, 4, 256, injects=True) == (4, 20_480)
    assert hyper.teams_of_a_block(card, 8192, 4, 256, injects=False) == (0, 0)
    assert hyper.teams_of_a_block(card, card.multiprocessors, 4, 256, injects=True) == (0, 0)

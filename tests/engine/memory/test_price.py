"""Sizes from a header and prices of chunks: a figure below what is really taken would end a start half way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device.arena import MIB
from strata.engine.device.meter import Meter
from strata.engine.memory.price import MIXER_ROWS, Price, prompt_shape
from strata.engine.memory.sizes import draft_bytes, model_sizes, rope_bytes
from strata.engine.model.draft import DraftLayer
from strata.engine.model.model import bind
from strata.engine.model.weights import rope_table
from strata.engine.pack import Pack, open_draft, open_pack
from strata.kernels.cuda import wide

from .conftest import CountedPasses

SMALL = ("tiny-q8_0", "tiny-q2_0", "tiny-q4_k_m", "tiny-iq3_xxs", "tiny-bf16", "odd-f32", "odd-q2_0")


def price_of(pack: Pack, context: int, mixer_rows: int = 0) -> Price:
    return Price(prompt_shape(pack.spec, {name: pack[name].type for name in pack}, context), mixer_rows)


@pytest.mark.parametrize("name", SMALL)
def test_no_weight_is_left_out_of_the_sizes(packs, name):
    pack, meter = open_pack(packs[name]), Meter(2)
    bind(pack, meter, rope_table(pack.spec, 1000, meter))
    sizes = model_sizes(pack.spec, pack)
    stacks = sum(
        -(-pack[f"blk.{i}.ffn_{p}_exps.weight"].data.size // 256) * 256
        for i in range(pack.spec.layers)
        for p in ("gate", "up", "down")
    )
    assert sizes.dense + sizes.head + rope_bytes(pack.spec, 1000) + stacks == meter.weights
    assert sizes.table == meter.table_bytes
    assert stacks == meter.stacks
    in_file = pack.spec.experts * sum(map(sum, meter.expert_sizes))
    assert sizes.expert_bytes >= in_file > 0  # each expert in lines of its own
    assert sizes.pairs == pack.spec.layers * pack.spec.experts


@pytest.mark.parametrize("names", [None, np.arange(0, 900, 3, dtype=np.int32)])
def test_no_weight_of_the_draft_layer_is_left_out(packs, names):
    pack, meter = open_pack(packs["tiny-q8_0"]), Meter(2)
    draft = replace(open_draft(pack, packs["mtp-tiny-q8_0"]), names=names)
    rope = rope_table(pack.spec, 1000, meter)
    embedding, head, _ = bind(pack, meter, rope)
    before = meter.weights
    DraftLayer(draft, meter, rope, (embedding, head))
    assert 0 <= meter.weights - before - draft_bytes(draft) <= 16 << 10  # small change for fixed factors


def test_the_full_size_is_that_of_the_published_model(full_pack):
    pack = open_pack(full_pack)
    sizes = model_sizes(pack.spec, pack)
    assert sizes.pairs == 24_576
    assert 416 * MIB < sizes.head < 418 * MIB
    assert sizes.largest == min(sizes.experts) == 2_329_600
    assert full_pack.stat().st_size > 61e9 > 1e9 > full_pack.stat().st_blocks * 512


@pytest.mark.parametrize("mixer_rows", [0, MIXER_ROWS])
@pytest.mark.parametrize("context", [32_768, 262_144, 1000])
def test_a_chunk_of_the_full_size_never_takes_more_than_its_price(full_pack, counted, cards, context, mixer_rows):
    pack = open_pack(full_pack)
    price = price_of(pack, context, mixer_rows)
    chunks = [n for n in (32, 200, 256, 512, 768, 1024, 2048, 4096, 8192) if n <= context]
    for figures in (cards.h100, cards.laptop):
        for chunk, taken in counted(pack, context, [0, *chunks], figures=figures, mixer_rows=mixer_rows).items():
            mine = price(chunk) if chunk else price.windows
            assert taken <= mine <= max(1.1 * taken + 32 * MIB, price.windows)
        assert price.windows < 30 * MIB


@pytest.mark.parametrize("mixer_rows", [0, MIXER_ROWS])
def test_long_products_find_room_for_halves_in_what_a_pass_takes_without_them(full_pack, monkeypatch, mixer_rows):
    """All but one of the n-gram layer, behind a mixer that takes some rows at a time."""
    found: list[int] = []
    call = wide.Wide.__call__
    monkeypatch.setattr(wide.Wide, "__call__", lambda way, *given: (found.append(way.wants), call(way, *given))[1])
    passes = CountedPasses(open_pack(full_pack), 32_768, mixer_rows=mixer_rows)
    for chunk in (1024, 2048, 4096, 8192):
        found.clear()
        passes.fit(chunk)
        wanted = len(found)
        found.clear()
        passes.run(chunk)
        assert len(found) >= wanted - (mixer_rows == MIXER_ROWS) > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_chunk_never_takes_more_than_its_price(packs, counted, name):
    pack = open_pack(packs[name])
    price = price_of(pack, 1000)
    for chunk, taken in counted(pack, 1000, [0, 17, 64, 256, 1000]).items():
        mine = price(chunk) if chunk else price.windows
        assert taken <= mine <= max(1.25 * taken, price.windows)


@pytest.mark.parametrize("context", [32_768, 1000])
def test_no_part_of_a_shorter_pass_takes_more_than_that_of_a_small_chunk_of_the_full_size(
    full_pack, counted, cards, context
):
    """Up to 16 rows go through kernels of windows, which take more than those of 17 rows do."""
    pack = open_pack(full_pack)
    price = price_of(pack, context)
    for figures in (cards.h100, cards.laptop):
        check_parts(price, counted(pack, context, [*range(1, 36), 63, 64, 65, 127, 128, 129], figures=figures))


@pytest.mark.parametrize("name", SMALL)
def test_no_part_of_a_shorter_pass_takes_more_than_that_of_a_chunk(packs, counted, name):
    pack = open_pack(packs[name])
    check_parts(price_of(pack, 128), counted(pack, 128, [*range(1, 129)]))


def test_no_part_of_a_chunk_whose_mixers_take_some_rows_at_a_time_takes_more_than_its_price(full_pack, counted):
    pack = open_pack(full_pack)
    lengths = [n + more for n in (1024, 2048, 3072) for more in (-1, 0, 1, 17)] + [1500, 3840, 8192]
    check_parts(price_of(pack, 32_768, MIXER_ROWS), counted(pack, 32_768, lengths, mixer_rows=MIXER_ROWS))


def check_parts(price: Price, counts) -> None:
    lengths, prices = sorted(counts), [price.parts(n) for n in sorted(counts)]
    for part in range(2):
        column = [each[part] for each in prices]
        assert column == sorted(column), "what is planned for a chunk is there for every shorter pass"
    assert not [n for n, mine in zip(lengths, prices, strict=True) if any(map(int.__gt__, counts[n].parts, mine))]


def test_a_longer_chunk_never_costs_less(full_pack):
    price = price_of(open_pack(full_pack), 262_144)
    prices = [price(n) for n in (1, 16, 32, 100, *range(256, 8193, 256))]
    assert prices == sorted(prices)
    assert price(8192) < 3 << 30


@pytest.mark.parametrize("kv", ["fp32", "q4_0"])
def test_counted_passes_over_the_first_layers_take_what_passes_over_all_take(full_pack, counted, kv):
    """Those that tests outside of the soak count."""
    pack, chunks = open_pack(full_pack), [0, 8, 16, 300, 2048]
    few, all_ = (counted(pack, 4096, chunks, kv=kv, whole=whole) for whole in (False, True))
    assert few == all_ and [few[n].parts for n in chunks] == [all_[n].parts for n in chunks]

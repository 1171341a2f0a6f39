"""strata-engine --device cuda: the real process on a real card, beside the one on the host."""

from __future__ import annotations

import json

import pytest

from strata.protocol.lines import Done, Token

pytestmark = pytest.mark.gpu

PACKS = ("odd-q8_0", "tiny-q4_k_m")
REQUESTS = (
    "GEN 12 5,6,7,8,9",
    "GEN 12 temperature=1.0 top_k=40 seed=7 " + ",".join(map(str, range(1, 90))),
    "GEN 12 temperature=0.8 seed=3 penalty_last_n=16 penalty_repeat=1.3 " + ",".join(map(str, range(50, 80))),
    "GEN 600 5,6,7",
)


@pytest.fixture(scope="module")
def on_card(start_engine, packs):
    def serve(*args: str, pack: str = "odd-q8_0"):
        engine = start_engine(
            "--serve", "--pack", str(packs[pack]), "--device", "cuda", "--verify-accounts", "--stats", *args
        )
        engine.info, engine.ready = engine.next(300), engine.next(300)
        assert engine.ready is not None, engine.log.read_text()
        return engine

    return serve


def texts(engine) -> list[tuple]:
    return [
        ([event.id for event in events if isinstance(event, Token)], events[-1].finish)
        for events in map(engine.ask, REQUESTS)
        if isinstance(events[-1], Done)
    ]


@pytest.mark.parametrize("pack", PACKS)
def test_the_card_answers_what_the_host_answers(on_card, serve_pack, pack):
    args = ("--max-context", "1024", "--eos-ids", "none")
    card = texts(on_card(*args, pack=pack))
    assert len(card) == len(REQUESTS)
    assert card == texts(serve_pack(*args, pack=pack))


@pytest.mark.parametrize("drafts", [("--suffix-draft", "7"), ("--spec-min-p", "0.1"), ("--kv", "fp16")])
def test_the_card_answers_with_drafts_what_it_answers_without(on_card, packs, drafts):
    args = ("--max-context", "1024", "--eos-ids", "none")
    kv = drafts if drafts[0] == "--kv" else ()
    with_layer = ("--mtp", str(packs["mtp-tiny-q8_0"]), "--spec", "4", *drafts)
    engine = on_card(*args, *with_layer, pack="tiny-q8_0")
    first = engine.ask(REQUESTS[-1])[-1]  # those after one that lost by drafts have none for a while
    assert first.drafts_offered > 0
    assert texts(engine) == texts(on_card(*args, *kv, pack="tiny-q8_0"))


def test_info_names_the_card_and_the_log_says_what_the_host_took(on_card):
    engine = on_card("--max-context", "1024", "--eos-ids", "none")
    info = engine.info.values
    assert info["device"] == "cuda" and info["vram_free_mib"] > 0 and info["gpu"]
    assert info["window_rows"] == 8 and info["prefill_chunk"] == 1024
    done = engine.ask("GEN 200 1,2,3")[-1]
    assert done.hits == done.lookups > 0 and done.ram_blobs == 0
    engine.send("QUIT")
    assert engine.exit_code() == 0
    assert "us a window over" in engine.log.read_text()


def test_a_stop_while_a_window_is_under_way_ends_the_request_and_the_next_one_continues(on_card):
    engine = on_card("--max-context", "4096", "--eos-ids", "none")
    engine.send("GEN 3000 1,2,3,4,5")
    events = engine.until(Token)
    engine.send("STOP")
    events += engine.until(Done)
    tokens = [event.id for event in events if isinstance(event, Token)]
    assert events[-1].finish == "cancel" and 0 < len(tokens) < 3000
    again = engine.ask(f"GEN 3 {','.join(map(str, [1, 2, 3, 4, 5, *tokens]))}")
    assert again[-1].finish == "length" and again[-1].reused == 5 + len(tokens) - 1


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--vram-limit-mib", "1"), "take"),
        (("--max-context", "4096", "--vram-limit-mib", "14"), "use a smaller --max-context"),
    ],
)
def test_a_card_that_is_too_small_ends_the_start_with_code_2_and_a_reason(start_engine, packs, args, reason):
    engine = start_engine("--serve", "--pack", str(packs["odd-q8_0"]), "--device", "cuda", *args)
    (error,) = engine.rest()
    assert error.text.startswith("--device cuda: ") and reason in error.text, json.dumps(error.text)
    assert engine.exit_code() == 2

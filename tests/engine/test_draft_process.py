"""The engine's process with drafts: the text of one without, what INFO, DONE, BDONE and log say, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from strata.protocol.lines import Admitted, Done, SlotDone, SlotToken, Token

PACK, DRAFT = "tiny-f32", "mtp-tiny-q8_0"
COMMON = ("--max-context", "160", "--prefill", "32", "--eos-ids", "none")
REPEATS = [*range(40, 52)] * 4


def gen(n: int, ids, keys: str = "") -> str:
    return f"GEN {n} {keys} {','.join(map(str, ids))}"


def text(outputs) -> list[int]:
    return [output.id for output in outputs if isinstance(output, Token)]


def asked() -> list[str]:
    ids = np.random.default_rng(3).integers(0, 900, 40).tolist()
    return [
        gen(50, ids),
        gen(50, REPEATS, "temperature=0.8 seed=5"),
        gen(50, ids[:9], "temperature=0.8 seed=6 penalty_repeat=1.3 penalty_last_n=20"),
    ]


@pytest.fixture(scope="module")
def plain(serve_pack):
    return serve_pack(*COMMON, "--batch", "3", pack=PACK)


@pytest.fixture(scope="module")
def drafting(serve_pack, packs):
    return serve_pack(
        *COMMON, "--batch", "3", "--mtp", str(packs[DRAFT]), "--spec", "4", "--batch-mtp", "--stats", pack=PACK
    )


def test_info_says_which_drafts_there_are(plain, drafting):
    names = ("spec", "mtp_max", "lookup", "spec_min_p")
    assert [plain.info.values[name] for name in names] == [1, 0, 0, 0.0]
    assert [drafting.info.values[name] for name in names] == [4, 3, 3, 0.0]


def test_the_log_says_where_drafts_come_from(drafting):
    assert "drafts: up to 3 of the draft layer and 3 of the text, one in each of 3 slots" in drafting.log.read_text()


def test_text_with_drafts_is_the_text_without(plain, drafting):
    offered = 0  # by all: drafts that did not pay for one request are not tried with the next
    for line in asked():
        without, withal = plain.ask(line), drafting.ask(line)
        assert text(withal) == text(without)
        assert withal[-1].generated == 50 and without[-1].drafts_offered == 0 and without[-1].chain is None
        assert withal[-1].chain is not None
        assert withal[-1].drafts_offered >= withal[-1].chain.suffix_offered >= 0
        assert withal[-1].lookups >= without[-1].lookups
        offered += withal[-1].drafts_offered
    assert offered > 0


def test_a_conversation_goes_on_behind_drafts(plain, drafting):
    ids = np.random.default_rng(4).integers(0, 900, 20).tolist()
    found = []
    for engine in (plain, drafting):
        first = engine.ask(gen(21, ids))
        second = engine.ask(gen(5, [*ids, *text(first), 7, 8]))
        found.append((text(first), text(second), second[-1].reused))
    assert found[0] == found[1]
    assert found[0][2] == 20 + 20


def in_slots(engine) -> tuple[dict[int, list[int]], dict[int, SlotDone]]:
    texts: dict[int, list[int]] = {}
    ends: dict[int, SlotDone] = {}
    for slot, line in enumerate(asked()):
        engine.send(line.replace("GEN 50", f"BGEN {slot} 50"))
    while len(ends) < 3:
        for output in engine.until(SlotDone, Admitted, SlotToken):
            if isinstance(output, SlotToken):
                texts.setdefault(output.slot, []).append(output.id)
            if isinstance(output, SlotDone):
                ends[output.slot] = output
    return texts, ends


def test_slots_with_drafts_say_what_they_say_without(plain, drafting):
    without, withal = in_slots(plain), in_slots(drafting)
    assert withal[0] == without[0]
    assert {slot: (end.generated, end.finish) for slot, end in withal[1].items()} == dict.fromkeys(
        range(3), (50, "length")
    )
    assert all(end.drafts_offered is None for end in without[1].values())
    assert all(end.drafts_offered is not None for end in withal[1].values())


def test_drafts_from_the_text_need_no_layer(serve_pack, plain):
    engine = serve_pack(*COMMON, "--spec", "2", "--suffix-draft", "6", pack=PACK)
    assert (engine.info.values["mtp_max"], engine.info.values["lookup"]) == (0, 6)
    line = gen(60, REPEATS)
    got = engine.ask(line)
    assert text(got) == text(plain.ask(line))
    assert isinstance(got[-1], Done) and got[-1].drafts_offered == got[-1].chain.suffix_offered


def test_a_draft_layer_that_is_not_there_is_refused_with_the_remedy(start_engine, packs):
    engine = start_engine("--serve", "--pack", str(packs[PACK]), "--mtp", "--spec", "4")
    (said,) = engine.rest()
    assert engine.exit_code() == 2
    assert "there is no draft layer in this file; name a file of the draft layer: --mtp FILE" in said.text


@pytest.mark.parametrize(("options", "env"), [(("--batch-mtp",), {}), ((), {"STRATA_BATCH_MTP": "1"})])
def test_options_that_come_to_nothing_are_said_and_the_slots_go_on(serve_pack, options, env):
    engine = serve_pack(*COMMON, "--batch", "2", *options, pack="odd-q8_0", env=env)
    assert "--batch-mtp is off: there is no draft layer: add --mtp" in engine.log.read_text()
    assert engine.info.values["batch_slots"] == 2
    assert len(text(engine.ask(gen(3, [1, 2, 3])))) == 3

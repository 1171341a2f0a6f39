"""The whole plan of the full-size model: accounts that balance, advice that is true, limits that are said."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.device.arena import GIB, MIB
from strata.engine.memory.advice import advise
from strata.engine.memory.command import gather, plan_text, switches
from strata.engine.memory.figures import DoesNotFit, Figures, MemoryPlan, Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.memory.sizes import draft_bytes
from strata.engine.memory.state import draft_slot_bytes
from strata.engine.options import Options, Refused, fitted, parse
from strata.engine.pack import Pack, open_draft, open_pack
from strata.engine.state.pages import page_shapes
from strata.engine.state.recurrent import recurrent_bytes

PLAIN = Switches()


@pytest.fixture(scope="module")
def pack(full_pack) -> Pack:
    return open_pack(full_pack)


@pytest.fixture(scope="module")
def drafts(pack, full_draft) -> dict[str, object]:
    """The figures of the draft layer."""
    found = open_draft(pack, full_draft)
    layer = draft_bytes(found)
    assert GIB < layer < 1.3 * GIB
    return {"draft": layer, "draft_slot": draft_slot_bytes(pack.spec, found.spec, "int8", 4096), "mtp": True}


@pytest.fixture(scope="module")
def planned(pack, full_profile, full_draft, drafts):
    """planned("--vram-limit-mib 8151 ..") -> figures, options, plan. PROFILE stands for the file; DRAFT is a model with
    its draft layer, MTP that layer's file, SLOTS one that drafts in batch slots too."""

    def make(line: str, switched: Switches = PLAIN) -> tuple[Figures, Options, MemoryPlan]:
        files = {"PROFILE": f"--expert-profile {full_profile}", "MTP": f"--mtp {full_draft}"}
        words = " ".join(files.get(word, word) for word in line.split()).split()
        given_words = [word for word in words if word not in ("DRAFT", "SLOTS")]
        options = fitted(parse(["--plan", "--pack", str(pack.path), *given_words]), pack.spec)
        figures = gather(pack, options)
        if "DRAFT" in words:
            figures = replace(figures, **drafts, draft_in_slots="SLOTS" in words)
        return figures, options, plan_memory(figures, options, switched)

    return make


LAPTOP = (
    "--device cuda --vram-limit-mib 8151 --ram-limit-mib 62000 --max-context 262144 --kv q4_0 --kv-resident 32768 "
    "--prompt-cache 3 --vram-reserve-mib 590 --serve PROFILE MTP --spec 4"
)
"""The settings of the measurements on an 8 GB card."""


def test_the_8_gb_card_reads_in_short_chunks_and_with_the_alias_in_long_ones_that_stream(planned):
    _, _, plain = planned(LAPTOP)
    assert (plain.card.way, plain.card.layout.chunk, len(plain.card.slots)) == ("own", 512, 0), "too few to lend"
    assert plain.card.free // MIB == 561, "of the reserve a prompt takes what it needs"
    _, _, lent = planned(f"{LAPTOP} --prefill-head-alias --short-read 0")
    assert (lent.card.way, lent.card.alias, lent.card.layout.lent) == ("head alias", "in place", 0)
    assert lent.card.layout.chunk == 3328 and lent.card.layout.head_bytes > 400 * MIB
    assert lent.card.free >= 590 * MIB, "the head keeps its memory, so the reserve is what it was"
    (copy,) = (line for line in lent.lines if line.what == "copy of the head")
    assert copy.place == "RAM" and abs(copy.n_bytes - 417 * MIB) < 4 * MIB


def test_a_12_gb_card_borrows_the_longest_chunk_and_the_alias_gains_nothing(planned):
    line = LAPTOP.replace("8151", "12288")
    _, _, plan = planned(f"{line} --prefill-head-alias --short-read 0")
    assert (plan.card.way, plan.card.alias, plan.card.layout.chunk) == ("borrowed", "off", 8192)
    (said,) = plan.said
    assert said.startswith("head alias: chunks of 8192 fit slots that prompts borrow, ") and "so it stays" in said


DESKTOP = (
    "--device cuda --vram-limit-mib 32607 --ram-limit-mib 49152 --max-context 262144 --kv int8 --serve PROFILE DRAFT "
    "--vram-reserve-mib 1536 --resident-experts --conversation-cache-mib 2048 --conversation-cache-slots 2"
)
"""The settings of the measurements on a 32 GB card."""


def test_a_32_gb_card_with_a_given_cache_reads_in_own_buffers_and_keeps_no_copies_for_lent_slots(planned):
    _, _, own = planned(f"{DESKTOP} --expert-cache 5400")
    assert (own.card.way, own.card.layout.chunk, own.card.layout.lent) == ("own", 8192, 0)
    assert own.homes.lent_copies == 0
    (experts,) = (line.n_bytes for line in own.lines if line.what == "experts" and line.place == "RAM")
    assert round(experts / GIB, 1) == 41.6
    _, _, lending = planned(f"{DESKTOP} --expert-cache 5400", Switches(own=False))
    assert (lending.card.way, len(lending.card.slots)) == ("borrowed", len(own.card.slots))
    assert lending.card.layout.lent > 600


def test_a_32_gb_card_with_an_auto_cache_borrows_with_and_without_the_own_planner(planned):
    _, _, plan = planned(DESKTOP)
    _, _, without = planned(DESKTOP, Switches(own=False))
    assert plan.card.way == without.card.way == "borrowed"
    assert len(plan.card.slots) == len(without.card.slots)
    assert 8_000 < len(plan.card.slots) < 12_000
    # 4.75 GiB of RAM stay beside the experts, of which 2 GiB are the parked conversations'
    free = next(line for line in plan.lines if line.what == "free" and line.place == "RAM")
    assert free.n_bytes >= 2816 * MIB and "2.75 GiB" in free.note


DOCUMENTED = Path(__file__).resolve().parents[3] / "docs" / "memory.md"
SHORT = "--ram-limit-mib 120000 --max-context 32768"
LONG = (
    "--ram-limit-mib 49152 --max-context 262144 --serve PROFILE MTP --spec 4 --vram-reserve-mib 1536 "
    "--resident-experts --conversation-cache-mib 2048 --conversation-cache-slots 2 --expert-cache"
)
WORDS = {
    "no profile": SHORT,
    "profile": f"{SHORT} PROFILE",
    "drafts": "MTP --spec 4",
    "262,144": LONG,
    "--expert-cache 5400": "5400",
    "--expert-cache 8000": "8000",
}
"""What the words of the documented table mean; others stand for themselves."""


def _documented() -> list[tuple[str, ...]]:
    """Rows of the table of plans in docs/memory.md, without its commas of thousands."""
    text = DOCUMENTED.read_text()
    table = text[text.index("| VRAM, MiB | line |") :].split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table]


@pytest.mark.parametrize("row", _documented(), ids=lambda row: f"{row[0]} {row[1]}")
def test_the_documented_plans_of_the_full_size_pack_are_what_the_planner_says(planned, row):
    vram, words, way, *figures = row
    line = " ".join(WORDS.get(word, word) for word in words.replace("`", "").split(", "))
    _, _, plan = planned(f"--device cuda --kv int8 --vram-limit-mib {vram.replace(',', '')} {line}")
    card = plan.card
    assert (card.way, card.layout.chunk, len(card.slots), card.layout.lent) == (
        way,
        *(int(figure.replace(",", "")) for figure in figures),
    )


def test_a_batch_slot_costs_what_the_documentation_counts(planned, pack):
    """873 MiB: keys and values 408, indexer keys 240, the recurrent state of two sides 225; a checkpoint of 114."""
    line = f"--device cuda --kv int8 --vram-limit-mib 32607 {SHORT}"
    (_, _, solo), (_, _, two) = planned(line), planned(f"{line} --batch 2")
    slots, kept = (
        [next(line.n_bytes for line in plan.lines if line.what == what) for plan in (solo, two)]
        for what in ("slots", "checkpoints")
    )
    arrays = [(name, size) for layer in page_shapes(pack.spec, "int8") for name, size in layer.items()]
    parts = {
        names: 512 * sum(prod(shape) * kind.itemsize for name, (shape, kind) in arrays if name in names) // MIB
        for names in (("k", "v"), ("raw", "block"))
    }
    assert list(parts.values()) == [408, 240] and 2 * recurrent_bytes(pack.spec) // MIB == 225
    assert round((slots[1] - slots[0]) / 2 / MIB) == 873 and round((kept[1] - kept[0]) / 2 / MIB) == 114


@pytest.mark.parametrize(("context", "chunk"), [(30_720, 3840), (32_768, 3584)])
def test_the_documented_chunk_of_a_lent_head_holds_at_its_context(planned, context, chunk):
    _, _, plan = planned(
        f"--device cuda --vram-limit-mib 8151 --ram-limit-mib 120000 --max-context {context} --kv int8 "
        "--prompt-cache 3 --vram-reserve-mib 590 --serve MTP --spec 4 --short-read 0 --prefill-head-alias"
    )
    assert (plan.card.alias, plan.card.layout.chunk, len(plan.card.slots)) == ("in place", chunk, 0)


def test_a_card_that_holds_everything_has_no_experts_in_ram(planned):
    _, _, plan = planned("--device cuda --vram-limit-mib 143771 --ram-limit-mib 65536 --max-context 32768")
    assert len(plan.card.slots) == 24_576 and plan.homes.missing == 0
    assert [line.n_bytes for line in plan.lines if line.what == "experts"] == [0]
    assert any(line.what == "n-gram table" and line.place == "VRAM" for line in plan.lines)
    assert plan.shortfalls == ()


@pytest.mark.parametrize(("vram", "more", "chunks"), [(8151, 1.7, 2.8), (12_288, 1.1, 4.0)])
def test_a_card_whose_prompts_borrow_slots_has_more_experts_and_longer_chunks(planned, vram, more, chunks):
    line = f"--device cuda --vram-limit-mib {vram} --ram-limit-mib 120000 --max-context 32768 --kv int8 PROFILE"
    (_, _, lends), (_, _, owns) = planned(line), planned(f"{line} --no-prefill-borrow")
    assert (lends.card.way, owns.card.way) == ("borrowed", "own")
    assert len(lends.card.slots) > more * len(owns.card.slots)
    assert lends.card.layout.chunk > chunks * owns.card.layout.chunk - 1
    assert lends.card.free >= 700 * MIB


@pytest.mark.parametrize(
    "extra", ["", "--batch 4", "--batch 3 SLOTS", "--ple-io vram", "--ple-io mmap", "--mmap-experts"]
)
@pytest.mark.parametrize("vram", [8151, 12_288, 32_607, 90_000])
def test_the_lines_of_a_place_add_up_to_what_is_there(planned, vram, extra):
    line = f"--device cuda --vram-limit-mib {vram} --ram-limit-mib 49152 --max-context 16384 --kv int8 PROFILE DRAFT"
    figures, _, plan = planned(f"{line} {extra}")
    for place, memory in (("VRAM", figures.vram), ("RAM", figures.ram)):
        assert sum(line.n_bytes for line in plan.lines if line.place == place) == memory.free
    assert all(line.n_bytes >= 0 for line in plan.lines)


def test_an_n_gram_table_that_stays_in_its_file_takes_no_ram_and_leaves_it_to_experts(planned):
    line = "--device cuda --vram-limit-mib 8151 --ram-limit-mib 32768 --resident-experts"
    (figures, _, in_ram), (_, _, filed) = planned(f"{line} --ple-io ram"), planned(f"{line} --ple-io mmap")
    tables = [[line for line in plan.lines if line.what == "n-gram table"] for plan in (in_ram, filed)]
    assert [(line.place, line.n_bytes) for line in tables[0]] == [("RAM", figures.sizes.table)] and not tables[1]
    assert len(filed.card.slots) == len(in_ram.card.slots) and filed.homes.copies > in_ram.homes.copies


def test_forms_of_experts_are_the_first_thing_that_a_smaller_card_does_without(planned):
    _, _, plan = planned("--device cuda --vram-limit-mib 98304")
    forms = sum(line.n_bytes for line in plan.lines if line.what == "forms of weights")
    assert plan.card and forms and plan.card.free > 0
    for vram in (98304, 98304 - forms // MIB - plan.card.free // MIB + 1024):
        _, _, without = planned(f"--device cuda --vram-limit-mib {vram}", Switches(forms=vram < 98304))
        assert not [line for line in without.lines if line.what == "forms of weights"]
        assert without.card and without.card.layout.chunk == plan.card.layout.chunk
        assert len(without.card.slots) == len(plan.card.slots)


def test_an_arena_that_does_not_fit_is_said_and_the_file_is_read_instead(planned):
    figures, options, plan = planned("--device cuda --vram-limit-mib 8151 --ram-limit-mib 32768")
    assert plan.homes.source == "mapped"
    assert "--resident-experts keeps copies" in plan.said[0]
    short = next(short for short in plan.shortfalls if short.what == "experts in RAM")
    advice = advise(figures, options, PLAIN, plan)[short]
    assert advice[0].option == "--resident-experts" and advice[0].got > 10_000


def test_resident_cpu_experts_that_do_not_fit_are_refused(planned):
    with pytest.raises(
        DoesNotFit, match=r"--resident-cpu-experts: .* of experts do not fit .*; use --resident-experts"
    ):
        planned("--device cuda --vram-limit-mib 8151 --ram-limit-mib 32768 --resident-cpu-experts")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--vram-limit-mib 3000", "--max-context 4096: one conversation takes 0.44 GiB, 0.00 MiB are left"),
        ("--vram-limit-mib 8151 --max-context 262144", "--max-context 262144: one conversation takes"),
        ("--vram-limit-mib 8151 --prefill-head-alias", "--prefill-head-alias: needs --serve"),
        ("--vram-limit-mib 8151 --prefill-head-alias --serve --short-read 0", "--prefill-head-alias: needs --mtp"),
        (
            "--vram-limit-mib 8151 --prefill-head-alias --serve PROFILE DRAFT",
            "--prefill-head-alias: excludes --short-read 64",
        ),
        (
            "--vram-limit-mib 8151 --prefill-head-alias --serve --short-read 0 PROFILE DRAFT --batch 2",
            "--prefill-head-alias: excludes --batch 2",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_limit_and_the_remedy(planned, line, what):
    with pytest.raises(DoesNotFit) as refused:
        planned(f"--device cuda --ram-limit-mib 65536 {line}")
    assert str(refused.value).startswith(what) and "; " in str(refused.value)


APPLIED = (
    "--max-context 16384 --kv int8 --batch 3 --vram-limit-mib 8151 --ram-limit-mib 49152 --device cuda",
    LAPTOP,
    "--max-context 8192 --vram-limit-mib 7000 --ram-limit-mib 30000 --device cuda PROFILE DRAFT --prompt-cache 5",
)


@pytest.mark.parametrize("line", APPLIED)
def test_advice_that_is_followed_gives_what_it_promised(planned, line):
    figures, options, plan = planned(line)
    advised = advise(figures, options, PLAIN, plan)
    assert set(advised) == set(plan.shortfalls) and any(advised.values())
    for short, advice in advised.items():
        for one in advice:
            assert one.got > short.got
            words = one.option.replace("FILE", "").replace("--expert-profile", "PROFILE")
            if one.option.startswith("without "):
                left_out = one.option.split()[1]
                changed = (
                    line.replace("DRAFT", "").replace("MTP", "")
                    if left_out == "--mtp"
                    else line.replace("--batch 3", "")
                )
            else:
                changed = f"{line} {words}"
            _, _, other = planned(changed)
            found = next((each.got for each in other.shortfalls if each.what == short.what), short.wanted)
            assert found == one.got, one


def test_doing_without_a_thing_is_no_advice_for_it(planned):
    figures, options, plan = planned(APPLIED[0])
    for short, advice in advise(figures, options, PLAIN, plan).items():
        named = " ".join(one.option for one in advice)
        assert not (short.what == "batch slots" and "--batch" in named)
        assert not (short.what == "checkpoints" and "--prompt-cache" in named)


def test_advice_names_all_that_it_needs_and_nothing_that_the_command_line_excludes(planned):
    line = "--device cuda --vram-limit-mib 7000 --ram-limit-mib 65536 --prompt-cache 0 PROFILE DRAFT"
    for extra, wanted in (
        ("", True),
        ("--batch 2", False),
        ("--expert-cache 50", False),
        ("--no-prefill-borrow", True),
    ):
        figures, options, plan = planned(f"{line} {extra}")
        named = {one.option for advice in advise(figures, options, PLAIN, plan).values() for one in advice}
        assert ("--prefill-head-alias --serve --short-read 0" in named) is wanted
        assert wanted or not any("--prefill-head-alias" in option for option in named)


def test_the_head_is_advice_for_longer_chunks_alone(planned):
    """With it an engine has no more experts in VRAM than without."""
    figures, options, plan = planned(LAPTOP)
    named = {
        short.what
        for short, advice in advise(figures, options, PLAIN, plan).items()
        for one in advice
        if "--prefill-head-alias" in one.option
    }
    assert named == {"prompt chunk"}


def test_json_says_the_same_as_the_table(pack):
    line = f"--plan --pack {pack.path} --device cuda --vram-limit-mib 12288 --ram-limit-mib 65536"
    options = fitted(parse(line.split()), pack.spec)
    text = plan_text(pack, options, {})
    found = json.loads(plan_text(pack, msgspec.structs.replace(options, json=True), {}))
    for each in found["lines"]:
        assert f"{each['what']} " in text and f"{each['bytes'] / MIB:,.0f}" in text
    assert f"{found['expert_cache']['slots']} of 24576 experts" in text
    for short in found["shortfalls"]:
        assert all(f"{one['option']}: {one['got']}" in text for one in short["advice"])
    assert max(map(len, text.splitlines())) < 140


def test_the_host_plans_its_ram_and_says_when_the_file_does_not_fit(planned):
    figures, _, plan = planned("--ram-limit-mib 32768 --serve --conversation-cache-mib 1000 --batch 2")
    assert figures.vram is None and plan.card is None and plan.slots.n_slots == 2
    assert sum(line.n_bytes for line in plan.lines) == figures.ram.free
    assert [short.what for short in plan.shortfalls] == ["weights in RAM"]
    with pytest.raises(DoesNotFit, match=r"one conversation takes .*; use a smaller context"):
        planned("--ram-limit-mib 1000 --max-context 262144")


def test_the_environment_changes_the_plan_and_nonsense_does_not():
    assert switches({}) == Switches()
    given_all = {
        "STRATA_PREFILL_OWN_AUTO": "0",
        "STRATA_PREFILL_LEND_PCT": "50",
        "STRATA_RESIDENT_HEADROOM_GIB": "4.75",
        "STRATA_ARENA_PIN_GIB": "20",
    }
    assert switches(given_all) == Switches(False, 50, 4864 * MIB, arena_pin=20480 * MIB)
    of_prompts = {"STRATA_PREFILL_RING": "97", "STRATA_PREFILL_STREAM_MIN": "512"}
    assert switches({**of_prompts, "STRATA_EXPERT_CACHE_HEADROOM": "0.05"}) == Switches(
        free=0.05, ring=97, stream_min=512
    )
    wrong = {"PREFILL_RING": "1", "PREFILL_STREAM_MIN": "32", "EXPERT_CACHE_HEADROOM": "1"}
    assert switches({f"STRATA_{name}": text for name, text in wrong.items()}) == Switches()
    assert switches({"STRATA_ARENA_PIN_GIB": "auto"}) == Switches(arena_pin="auto")
    assert switches({"STRATA_ARENA_PIN_GIB": "0"}) == switches({"STRATA_ARENA_PIN_GIB": "-3"}) == Switches()
    assert switches({"STRATA_CARD_FORMS": "0"}) == Switches(forms=False)
    assert switches({"STRATA_CARD_FORMS": ""}) == switches({"STRATA_CARD_FORMS": "1"}) == Switches()
    nonsense = dict.fromkeys(given_all, "x") | {"STRATA_PREFILL_OWN_AUTO": ""}
    assert switches(nonsense) == Switches()
    assert switches({"STRATA_PREFILL_LEND_PCT": "101", "STRATA_RESIDENT_HEADROOM_GIB": "-1"}) == Switches()


def test_files_that_cannot_be_read_are_refused_by_their_option(pack, full_draft):
    def refusal(line: str) -> str:
        options = fitted(
            parse(f"--plan --pack {pack.path} --device cuda --vram-limit-mib 9000 {line}".split()), pack.spec
        )
        with pytest.raises(Refused) as refused:
            gather(pack, options)
        return str(refused.value)

    assert refusal(f"--expert-profile {full_draft}").startswith("--expert-profile: ")
    assert refusal("--expert-profile /nowhere.strp").startswith("--expert-profile: /nowhere.strp: No such file")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vram=st.integers(5_000, 90_000),
    more=st.integers(1, 8_000),
    context=st.sampled_from([1000, 4096, 32_768, 262_144]),
    kv=st.sampled_from(["fp32", "int8", "q4_0"]),
    profile=st.sampled_from(["", "PROFILE"]),
    reserve=st.sampled_from(["", "--vram-reserve-mib 0", "--vram-reserve-mib 900"]),
    prefill=st.sampled_from(["", "--prefill 2048"]),
)
def test_a_larger_card_reads_at_least_as_long_chunks_and_holds_as_many_experts(
    planned, vram, more, context, kv, profile, reserve, prefill
):
    line = f"--device cuda --ram-limit-mib 65536 --max-context {context} --kv {kv} --prompt-cache 0 {profile} {reserve}"
    try:
        _, _, plan = planned(f"{line} {prefill} --vram-limit-mib {vram}")
    except DoesNotFit:
        return
    _, _, larger = planned(f"{line} {prefill} --vram-limit-mib {vram + more}")
    first_cache = larger.card.way == "borrowed" != plan.card.way and not len(plan.card.slots)
    holds_all = len(larger.card.slots) == 24_576 > len(plan.card.slots)
    assert larger.card.layout.chunk >= plan.card.layout.chunk or first_cache or holds_all, (
        "but where a cache is the better use of it, or nothing streams any more"
    )
    assert len(larger.card.slots) >= len(plan.card.slots)
    assert plan.card.free >= 0


def test_streamed_keys_and_values_move_from_vram_to_ram(planned):
    line = "--device cuda --vram-limit-mib 32607 --ram-limit-mib 65536 --max-context 262144 --kv int8"
    _, _, whole = planned(line)
    _, _, streamed = planned(f"{line} --kv-resident 32768")
    taken = {
        name: next(line.n_bytes for line in plan.lines if line.what == "slots")
        for name, plan in (("w", whole), ("s", streamed))
    }
    assert taken["s"] < taken["w"] / 3
    assert next(line.n_bytes for line in streamed.lines if line.what == "keys and values") > 3 * GIB


@pytest.mark.parametrize("prompts", ["PROFILE", "", "PROFILE --prefill-head-alias --short-read 0 --serve DRAFT"])
def test_a_share_of_the_card_that_stays_free_comes_off_the_experts_and_nothing_else(planned, prompts):
    line = f"--device cuda --vram-limit-mib 16384 --ram-limit-mib 120000 --max-context 32768 --kv int8 {prompts}"
    (_, _, plain), (_, _, less) = planned(line), planned(line, Switches(free=0.25))
    lost = plain.card.slots.n_bytes - less.card.slots.n_bytes
    assert less.card.reserve - plain.card.reserve > GIB and less.card.free >= less.card.reserve
    assert abs(lost - (less.card.reserve - plain.card.reserve)) < 200 * MIB
    assert less.card.layout.chunk == plain.card.layout.chunk


def test_a_ring_of_another_size_is_paid_for_by_experts(planned):
    line = "--device cuda --vram-limit-mib 12288 --ram-limit-mib 120000 --max-context 32768 --kv int8"
    rings, experts = [], []
    for ring in (0, 8, 97, 256):
        figures, _, plan = planned(f"{line} --no-prefill-borrow PROFILE", Switches(ring=ring))
        rings.append(plan.card.ring // figures.sizes.largest)
        experts.append(len(plan.card.slots))
    assert rings == [64, 8, 96, 256]
    assert experts[1] > experts[0] > experts[2] > experts[3]
    _, _, lent = planned(f"{line} PROFILE", Switches(ring=256))
    assert lent.card.way == "borrowed" and lent.card.ring // figures.sizes.largest == 256


def test_chunks_stream_from_so_many_tokens_on(planned):
    card = "--device cuda --vram-limit-mib 12288 --ram-limit-mib 120000"
    line = f"{card} --max-context 32768 --kv int8 --prefill 512 PROFILE"
    (_, _, plain), (_, _, streams) = planned(line), planned(line, Switches(stream_min=512))
    assert (plain.card.way, plain.card.ring, streams.card.way) == ("borrowed", 0, "borrowed")
    assert streams.card.ring > 100 * MIB and streams.card.layout.lent > plain.card.layout.lent


@pytest.mark.parametrize(
    "where", ["--mmap-experts", "--ram-limit-mib 32768", "--ram-limit-mib 32768 --resident-experts"]
)
def test_prompts_borrow_slots_also_where_experts_lie_in_the_file(planned, where):
    """The longer a chunk, the fewer times all of the file is read: RAM has copies of the slots that are lent."""
    line = f"--device cuda --vram-limit-mib 8151 --ram-limit-mib 120000 --max-context 32768 --kv int8 PROFILE {where}"
    (figures, _, plan), (_, _, owns) = planned(line), planned(f"{line} --no-prefill-borrow")
    assert (plan.card.way, owns.card.way) == ("borrowed", "own") and plan.homes.mapped_bytes > GIB
    assert plan.card.layout.chunk > 2.8 * owns.card.layout.chunk and len(plan.card.slots) > len(owns.card.slots)
    assert plan.homes.lent_copies == plan.card.layout.lent > 0
    of_ram = [line.n_bytes for line in plan.lines if line.place == "RAM"]
    assert sum(of_ram) == figures.ram.free and min(of_ram) >= 0
    if "resident" in where:
        assert owns.homes.copies - plan.homes.copies <= plan.homes.lent_copies + 8, (
            "copies of slots come off the others"
        )


def test_prompts_have_own_buffers_where_ram_has_no_room_for_copies_of_slots(planned):
    line = "--device cuda --vram-limit-mib 8151 --max-context 32768 --kv int8 PROFILE --mmap-experts --ram-limit-mib"
    found = [planned(f"{line} {ram}")[2].card for ram in (640, 1200, 4096)]
    assert [card.way for card in found] == ["own", "borrowed", "borrowed"]
    assert found[1].layout.chunk < found[2].layout.chunk


def test_copies_of_slots_are_no_reason_to_refuse_a_card_whose_experts_all_fit_ram(planned):
    line = "--device cuda --vram-limit-mib 8151 --max-context 32768 --kv int8 PROFILE --resident-cpu-experts"
    chunks = set()
    for ram in range(62_300, 62_900, 100):
        _, _, plan = planned(f"{line} --ram-limit-mib {ram}")
        assert plan.homes.copies == plan.homes.missing
        chunks.add((plan.card.way, plan.card.layout.chunk))
    assert len(chunks) > 1

"""`strata-engine --plan` as a process: no card, no weights, one table or one JSON object, an exit code that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.engine.device.arena import MIB

ENGINE = Path(sys.executable).with_name("strata-engine")
COMMON = "--device cuda --max-context 32768 --kv int8 --serve --short-read 0"


def run(*argv: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ENGINE), "--plan", *map(str, argv)],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture(scope="module")
def plan_of(full_pack, full_profile):
    """plan_of(8151, ..) -> the JSON of the full-size model on a card of so many MiB."""

    def plan(vram: int, *extra: object, env: dict[str, str] | None = None) -> dict:
        files = ("--pack", full_pack, "--expert-profile", full_profile)
        limits = ("--vram-limit-mib", vram, "--ram-limit-mib", 65536)
        done = run(*files, *limits, *COMMON.split(), "--json", *extra, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return plan


def test_an_8_gb_card_lends_most_of_its_slots_for_a_chunk(plan_of):
    plan = plan_of(8151, "--vram-reserve-mib", 590)
    assert plan["prompt"]["way"] == "borrowed" and 256 <= plan["prompt"]["chunk"] < 8192
    assert plan["free_decoding"] >= plan["reserve"] == 590 * MIB
    slots, lent = plan["expert_cache"]["slots"], plan["prompt"]["lent_slots"]
    assert slots - lent >= 128 and 2 * lent > slots
    advice = next(short for short in plan["shortfalls"] if short["what"] == "experts in VRAM")["advice"]
    assert advice and all(one["got"] > slots for one in advice)


def test_an_8_gb_card_gets_its_long_chunk_from_the_head(plan_of, full_draft):
    line = ("--vram-reserve-mib", 590, "--mtp", full_draft, "--spec", 4)
    plain, lent = plan_of(8151, *line), plan_of(8151, *line, "--prefill-head-alias")
    chunk = lent["prompt"]["chunk"]
    assert chunk >= 3 << 10 > plain["prompt"]["chunk"]
    assert (lent["prompt"]["way"], lent["prompt"]["head"]) == ("head alias", "in place")
    assert min(lent["free_decoding"], plain["free_decoding"]) >= 590 * MIB
    advice = next(short for short in plain["shortfalls"] if short["what"] == "prompt chunk")["advice"]
    assert {"option": "--prefill-head-alias", "got": chunk} in advice


def test_a_12_gb_card_borrows_for_chunks_of_8192(plan_of):
    plan = plan_of(12_288)
    assert (plan["prompt"]["way"], plan["prompt"]["chunk"]) == ("borrowed", 8192)
    slots, lent = plan["expert_cache"]["slots"], plan["prompt"]["lent_slots"]
    assert 1500 < slots < 3000 and slots - lent >= 128 and 100 * lent <= 90 * slots
    assert plan["experts"]["source"] == "arena" and plan["experts"]["from_file_bytes"] == 0


def test_a_32_gb_card_borrows_by_itself_and_reads_in_own_buffers_beside_a_given_cache(plan_of):
    auto, given = plan_of(32_607), plan_of(32_607, "--expert-cache", 8000)
    assert (auto["prompt"]["way"], auto["prompt"]["chunk"]) == ("borrowed", 8192)
    assert (given["prompt"]["way"], given["prompt"]["lent_slots"]) == ("own", 0)
    assert given["expert_cache"]["slots"] == 8000 < auto["expert_cache"]["slots"]
    ab = plan_of(32_607, "--expert-cache", 8000, env={"STRATA_PREFILL_OWN_AUTO": "0"})
    assert (ab["prompt"]["way"], ab["expert_cache"]) == ("borrowed", given["expert_cache"])


def test_a_plan_is_a_table_for_people_and_reads_no_tensor(full_pack):
    begun = time.perf_counter()
    done = run("--pack", full_pack, "--device", "cuda", "--vram-limit-mib", 12_288, "--ram-limit-mib", 32_768)
    assert time.perf_counter() - begun < 20
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["where", "what", "MiB"]
    for what in (
        "dense weights",
        "output head",
        "expert cache",
        "prompt buffers",
        "n-gram table",
        "less than could be",
    ):
        assert any(what in line for line in lines), what
    assert full_pack.stat().st_blocks * 512 < 1 << 20  # still a hole


def test_a_plan_of_a_command_line_to_serve_with_speaks_no_protocol(full_pack):
    done = run("--serve", "--pack", full_pack, "--ram-limit-mib", 32_768)
    assert done.returncode == 0 and done.stdout.startswith("where") and "INFO" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--vram-limit-mib", 2000), "one conversation takes"),
        (("--vram-limit-mib", 8151, "--prefill-head-alias"), "--prefill-head-alias: needs --serve"),
        (("--vram-limit-mib", 8151, "--expert-profile", "/nowhere"), "--expert-profile: /nowhere: No such file"),
        (("--vram-limit-mib", 8151, "--mtp", "/nowhere.gguf", "--spec", 4), "--mtp: /nowhere.gguf"),
    ],
)
def test_a_plan_that_is_refused_ends_with_code_2_and_one_line(full_pack, argv, reason):
    done = run("--pack", full_pack, "--device", "cuda", "--ram-limit-mib", 32_768, *argv)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and reason in done.stderr

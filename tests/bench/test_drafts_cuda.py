"""The bench of verify windows, on a card without hardware: it compares first, and measures what it says."""

from __future__ import annotations

import pytest
from rich.console import Console

from strata.bench.drafts_cuda import checks, measure, prompt_of
from strata.engine.cuda_runner import CudaRunner
from strata.engine.options import Options
from strata.engine.pack import open_draft, open_pack


@pytest.fixture(scope="module")
def runner(emulated_card, trunk, packs):
    draft = open_draft(open_pack(packs["tiny-q8_0"]), packs["mtp-tiny-q8_0"])
    draft.pack.spec = trunk.spec
    options = Options(pack="", device="cuda", max_context=96, prefill=18, spec=3, mtp="")
    with emulated_card.plugged_in() as card:
        yield CudaRunner(trunk, options, draft, card.driver())


def test_drafts_are_compared_with_windows_without_before_anything_is_timed(runner):
    found = checks(runner, prompt_of(900, 11), [2, 3], 6)
    assert len(found) == 12 and sum("rounds" in each.name for each in found) == 4
    assert all(each.ok for each in found), [each.name for each in found if not each.ok]


@pytest.mark.soak  # the emulated card takes long for it
def test_every_kind_of_window_is_measured(runner):
    records = {r.work: r for r in measure(runner, prompt_of(900, 11), [2, 3], 8, Console())}
    assert {"window without drafts", "window of 3 rows, forced", "window of 2 rows, the last one wrong"} <= set(records)
    assert {"2 proposals behind a window", "round of 2 rows", "round of 3 rows: tokens"} <= set(records)
    assert all(r.median > 0 for r in records.values())

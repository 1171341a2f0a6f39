"""The bench of verify windows, on a card without hardware: it compares first, and measures what it says."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from strata.bench.drafts_cuda import checks, measure, prompt_of
from strata.engine.cuda_runner import CudaRunner
from strata.engine.options import Options
from strata.engine.pack import Pack, open_draft, open_pack

LAYERS = 2


@pytest.fixture(scope="module")
def runner(request, packs, tmp_path_factory):
    path = Path(__file__).parents[1] / "engine" / "device" / "emulated_card.py"
    spec = importlib.util.spec_from_file_location("strata_test_emulated_card", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cache_dir = getattr(request.config, "cache", None)
    folder = Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("emulated")
    whole = open_pack(packs["tiny-q8_0"])

    class Short(Pack):
        def __init__(self) -> None:
            self.__dict__ |= whole.__dict__
            kinds = (True, False)
            self.spec = replace(whole.spec, layers=LAYERS, recurrent=kinds, ratios=(0, 4), ple=None)

        def weight(self, name: str):
            return super().weight(name.replace("blk.1.", "blk.3."))

        def array(self, name: str):
            return super().array(name.replace("blk.1.", "blk.3."))

    trunk = Short()
    draft = open_draft(whole, packs["mtp-tiny-q8_0"])
    draft.pack.spec = trunk.spec
    options = Options(pack="", device="cuda", max_context=96, prefill=18, spec=3, mtp="")
    with module.EmulatedCard(folder).plugged_in() as card:
        yield CudaRunner(trunk, options, draft, card.driver())


def test_drafts_are_compared_with_windows_without_before_anything_is_timed(runner):
    found = checks(runner, prompt_of(900, 11), [2, 3], 6)
    assert len(found) == 8
    assert all(each.ok for each in found), [each.name for each in found if not each.ok]


@pytest.mark.soak  # the emulated card takes long for it
def test_every_kind_of_window_is_measured(runner):
    records = {r.work: r for r in measure(runner, prompt_of(900, 11), [2, 3], 8, Console())}
    assert {"window without drafts", "window of 3 rows, forced", "window of 2 rows, the last one wrong"} <= set(records)
    assert "2 proposals behind a window" in records
    assert all(r.median > 0 for r in records.values())

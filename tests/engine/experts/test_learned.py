"""The learned order names every expert once, and its file is never half of one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.experts import learned
from strata.engine.experts.learned import LEAST_WINDOWS, Keeping, Learned, ordered
from strata.engine.experts.placement import by_number
from strata.engine.memory.profile import read_profile

LAYERS, EXPERTS = 2, 3


@given(layers=st.integers(1, 4), experts=st.integers(1, 6), data=st.data())
def test_experts_come_by_use_and_among_equals_as_before(layers, experts, data):
    picks = np.array(data.draw(st.lists(st.integers(0, 3), min_size=layers * experts, max_size=layers * experts)))
    picks = picks.reshape(layers, experts)
    everything = by_number(layers, experts)
    former = data.draw(st.none() | st.lists(st.sampled_from(everything), unique=True).map(tuple))
    found = ordered(picks, former)
    assert sorted(found) == sorted(everything)
    before = [*(former or ()), *(pair for pair in everything if pair not in (former or ()))]
    for one, other in pairwise(found):
        assert (-picks[one], before.index(one)) < (-picks[other], before.index(other))


def learn(path, every: int = 1, windows: int = LEAST_WINDOWS) -> Learned:
    made = Learned(Keeping(path, every), np.zeros((LAYERS, EXPERTS), np.int64), slots=4)
    picks = np.zeros((LAYERS, EXPERTS), np.int64)
    picks[1, 2] = 9
    made.add(picks, windows)
    return made


def test_a_file_of_another_order_is_replaced_only_when_windows_have_shown_one(tmp_path):
    path = tmp_path / "hot.strp"
    path.write_bytes(b"old")
    few = learn(path, windows=LEAST_WINDOWS - 1)
    few.write()
    assert path.read_bytes() == b"old"
    few.add(np.zeros((LAYERS, EXPERTS), np.int64), 1)
    few.write()
    profile = read_profile(path, LAYERS, EXPERTS)
    assert profile.pairs[0] == (1, 2) and len(profile.pairs) == LAYERS * EXPERTS and profile.slots == 4
    path.write_bytes(b"newer")
    few.write()
    assert path.read_bytes() == b"newer", "nothing was learned since"
    assert list(tmp_path.iterdir()) == [path]


def test_the_order_is_written_behind_every_so_many_requests(tmp_path):
    path = tmp_path / "hot.strp"
    made = learn(path, every=3)
    made.request_over()
    made.request_over()
    assert not path.exists()
    made.request_over()
    assert path.exists()


def test_a_folder_that_is_gone_is_said_once_and_costs_no_request(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(learned, "log", said.append)
    folder = tmp_path / "gone"
    made = learn(folder / "hot.strp")
    for _ in range(3):
        made.request_over()
    assert said == [
        f"--expert-profile-save: {folder}/hot.strp: No such file or directory; it is tried again later",
    ]
    folder.mkdir()
    made.request_over()
    assert (folder / "hot.strp").exists()


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "hot.strp"
    learn(path).write()
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    again = learn(path)
    again.picks[0, 0] = 99
    again.write()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    again.write()
    assert read_profile(path, LAYERS, EXPERTS).pairs[0] == (0, 0)


@pytest.mark.parametrize("name", ["", "gone/hot.strp"])
def test_a_place_that_cannot_be_written_is_refused_at_start(tmp_path, name):
    from strata.engine.memory.command import keeping_of
    from strata.engine.options import Options, Refused

    with pytest.raises(Refused, match=r"--expert-profile-save: .* cannot be written; name a file in a folder that can"):
        keeping_of(Options(pack="", expert_profile_save=str(tmp_path / name)), None)

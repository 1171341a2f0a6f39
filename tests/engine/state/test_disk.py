"""Parked files: found after a restart, whole or not at all, and left alone when they are not ours."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from strata.engine.state import disk as disk_module
from strata.engine.state.checkpoints import Checkpoint
from strata.engine.state.disk import SUFFIX, UNFINISHED, DiskError, ParkingDisk
from strata.engine.state.parked import FIGURES, SUMS, Parked, capture
from strata.engine.state.parked_file import PREFIX, Figures
from strata.engine.state.parking import Parking, ParkingRules
from strata.engine.state.slots import StatePool
from strata.kernels.ops import PAGE

CONTEXT = 4 * PAGE
OURS, OTHER = b"a" * 32, b"b" * 32
BUDGET = 1 << 30


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, n).astype(np.int32)


@pytest.fixture
def state(spec) -> StatePool:
    return StatePool(spec, 1, CONTEXT, n_checkpoints=1)


@pytest.fixture
def open_disk(tmp_path, state):
    """open_disk(budget): what a start of the engine finds in the folder."""
    figures = Figures(state.pages.page_bytes, state.recurrent.n_bytes)
    return lambda budget=BUDGET, own=OURS: ParkingDisk(tmp_path / "parked", budget, own, figures)


def conversation(state: StatePool, n: int, seed: int = 0) -> Parked:
    """A conversation of n tokens with a checkpoint in its middle; its state is random."""
    rng, tokens = np.random.default_rng(seed), words(n, seed)
    state.reset(0)
    state.reserve(0, n)
    for array in (*state.recurrent.arrays, *state.pages.arrays):
        array[...] = rng.integers(1, 99, array.shape)
    state.advance(0, n // 2)
    state.copy(0, 1)
    state.advance(0, n - n // 2)
    return capture(state, 0, tokens, {1: Checkpoint(tokens[: n // 2].copy(), "turn", 0)})


def written(disk: ParkingDisk, *parked: Parked) -> list[Path]:
    for each in parked:
        disk.keep(each)
    disk.settle()
    return [shelved.path for shelved in disk.shelved]


def test_a_conversation_is_found_after_a_restart_with_every_byte(open_disk, state):
    parked = conversation(state, 130)
    (path,) = written(open_disk(), parked)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = open_disk()
    (shelved,) = again.shelved
    assert shelved.positions == (65, 130)
    np.testing.assert_array_equal(shelved.tokens, parked.tokens)
    loaded = again.load(shelved)
    for one, two in zip((loaded.image, *loaded.marks), (parked.image, *parked.marks), strict=True):
        np.testing.assert_array_equal(one.block, two.block)
    np.testing.assert_array_equal(loaded.image.pages, parked.image.pages)
    assert loaded.seal == parked.seal and again.counts.hits == 1


def test_the_file_is_as_the_page_describes_it(open_disk, state):
    """docs/parking.md, read by hand."""
    parked = conversation(state, 70)
    (path,) = written(open_disk(), parked)
    data = path.read_bytes()
    assert data[:8] == b"STRATAPK" and struct.unpack_from("<I", data, 8) == (1,)
    (size,) = struct.unpack_from("<I", data, 12)
    assert data[16:48] == OURS
    n, n_pages, n_block = struct.unpack_from("<QQQ", data, 48)
    pages, block, n_marks = struct.unpack_from("<III", data, 72)
    assert (n, n_marks) == (70, 1)
    assert struct.unpack_from("<QII", data, 84) == (35, 1, zlib.crc32(data[size + n_pages + n_block :]))
    np.testing.assert_array_equal(np.frombuffer(data, "<i4", 70, 100), parked.tokens)
    assert struct.unpack_from("<I", data, size - 4) == (zlib.crc32(data[: size - 4]),)
    assert (zlib.crc32(data[size : size + n_pages]), zlib.crc32(data[size + n_pages :][:n_block])) == (pages, block)
    assert len(data) == size + n_pages + 2 * n_block
    assert PREFIX.size + FIGURES.size + SUMS.size == 84


def test_a_flipped_byte_anywhere_in_a_file_is_noticed(open_disk, state):
    (path,) = written(open_disk(), conversation(state, 70))
    data = path.read_bytes()
    (size,) = struct.unpack_from("<I", data, 12)
    rng = np.random.default_rng(1)
    for at in (*range(size), *rng.integers(size, len(data), 150).tolist(), len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        found = open_disk()
        assert not [shelved for shelved in found.shelved if found.load(shelved) is not None], at
        assert found.counts.foreign + found.counts.torn + found.counts.damaged == 1, at
        assert path.read_bytes() == changed, "it is left alone"


def test_a_file_that_changes_after_the_start_is_noticed(open_disk, state):
    disk = open_disk()
    (path,) = written(disk, conversation(state, 70))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert disk.load(disk.shelved[0]) is None
    assert disk.counts.damaged == 1 and not disk.shelved and path.exists()


def test_a_file_that_somebody_deleted_is_a_prompt_that_is_read(open_disk, state):
    disk = open_disk()
    (path,) = written(disk, conversation(state, 70))
    path.unlink()
    assert disk.load(disk.shelved[0]) is None and not disk.shelved


@pytest.mark.parametrize("length", [0, 10, 47, 60, 120, -1, "longer"])
def test_a_torn_file_is_left_alone(open_disk, state, length):
    (path,) = written(open_disk(), conversation(state, 70))
    data = path.read_bytes()
    data = data + b"\0" if length == "longer" else data[:length]
    path.write_bytes(data)
    disk = open_disk()
    assert not disk.shelved and disk.counts.torn == 1
    assert path.read_bytes() == data


@pytest.mark.parametrize("figure", ["tokens", "pages", "block", "marks", "position", "kind", "head"])
def test_figures_that_do_not_fit_are_refused_before_they_are_used(open_disk, state, figure):
    (path,) = written(open_disk(), conversation(state, 70))
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<I", data, 12)
    form, at = {
        "tokens": ("<Q", 48),
        "pages": ("<Q", 56),
        "block": ("<Q", 64),
        "marks": ("<I", 80),
        "position": ("<Q", 84),
        "kind": ("<I", 92),
        "head": ("<I", 12),
    }[figure]
    for value in (0, 4, (1 << 32) - 1, (1 << 63) if form == "<Q" else 1 << 31):
        if figure == "kind" and value == 0:
            continue
        struct.pack_into(form, data, at, value)
        struct.pack_into("<I", data, size - 4, zlib.crc32(data[: size - 4]))
        path.write_bytes(data)
        disk = open_disk()
        if figure == "position" and value == 4:
            assert disk.shelved[0].positions == (4, 70), "any position below the length is one"
        else:
            assert not disk.shelved and disk.counts.torn + disk.counts.foreign == 1, value


def test_files_of_another_model_are_neither_loaded_nor_deleted(open_disk, state):
    (path,) = written(open_disk(own=OTHER), conversation(state, 70))
    disk = open_disk()
    assert not disk.shelved and disk.counts.foreign == 1
    paths = written(disk, conversation(state, 70))
    assert len(paths) == 1 and path.exists() and path not in paths, "the same tokens have another name"


def test_states_of_another_size_are_foreign(open_disk, state, tmp_path):
    written(open_disk(), conversation(state, 70))
    figures = Figures(state.pages.page_bytes, state.recurrent.n_bytes + 4)
    disk = ParkingDisk(tmp_path / "parked", BUDGET, OURS, figures)
    assert not disk.shelved and disk.counts.foreign == 1


def test_over_the_budget_the_oldest_files_go_whoever_wrote_them(open_disk, state):
    first = conversation(state, 70)
    (path,) = written(open_disk(own=OTHER), first)
    one = path.stat().st_size
    left = path.with_name(f"left.123{UNFINISHED}")
    left.write_bytes(b"x" * one)
    os.utime(path, (1, 1))
    os.utime(left, (2, 2))
    disk = open_disk(budget=3 * one)
    old, middle = (written(disk, conversation(state, 70, seed))[-1] for seed in (1, 2))
    assert not path.exists() and left.exists(), "the foreign file goes before the one that was never finished"
    os.utime(old, (5, 5))
    os.utime(middle, (4, 4))
    written(disk, conversation(state, 70, 3), conversation(state, 70, 4))
    assert not left.exists() and not middle.exists() and old.exists()
    assert sum(p.stat().st_size for p in path.parent.iterdir()) == 3 * one
    assert len(disk.shelved) == 3 and disk.counts.deleted == 3


def test_a_hit_counts_as_use(open_disk, state):
    disk = open_disk()
    (path,) = written(disk, conversation(state, 70))
    os.utime(path, (1, 1))
    disk.load(disk.shelved[0])
    assert path.stat().st_mtime > 1000


def test_a_longer_conversation_takes_the_place_of_its_beginning(open_disk, state):
    whole = conversation(state, 130)
    conversation(state, 70)
    disk = open_disk()
    first = written(disk, capture(state, 0, whole.tokens[:70], {}))
    second = written(disk, whole)
    assert len(second) == 1 and first != second and not first[0].exists()


def test_a_failed_write_leaves_nothing_and_the_next_one_works(open_disk, state, monkeypatch, tmp_path):
    disk, real = open_disk(), disk_module.write_file

    def full(path: Path, *rest: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module, "write_file", full)
    assert not written(disk, conversation(state, 70))
    assert disk.counts.failed == 1 and not list((tmp_path / "parked").iterdir())
    monkeypatch.setattr(disk_module, "write_file", real)
    assert written(disk, conversation(state, 70))


def test_tokens_that_changed_in_memory_are_not_written(open_disk, state):
    disk, parked = open_disk(), conversation(state, 70)
    parked.tokens[3] ^= 1
    assert not written(disk, parked) and disk.counts.failed == 1


def test_what_is_no_plain_file_does_not_stop_the_start(open_disk, state, tmp_path):
    folder = tmp_path / "parked"
    folder.mkdir()
    os.mkfifo(folder / f"fifo{SUFFIX}")
    (folder / f"folder{SUFFIX}").mkdir()
    (folder / f"nowhere{SUFFIX}").symlink_to("gone")
    (folder / "notes.txt").write_text("mine")
    disk = open_disk()
    assert disk.counts.foreign == 3
    assert len(written(disk, conversation(state, 70))) == 1 and (folder / "notes.txt").exists()


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(open_disk, tmp_path):
    (tmp_path / "parked").write_text("a file")
    with pytest.raises(DiskError, match=r"parked conversations cannot lie in .*/parked: "):
        open_disk()


def test_ram_and_disk_together_give_what_either_has(open_disk, state):
    disk = open_disk()
    parking = Parking(ParkingRules(1 << 30, most=1), lambda: 1 << 40, disk)
    prompts = []
    for seed in range(3):
        parked = conversation(state, 70, seed)
        parking.park(state, 0, parked.tokens, {})
        prompts.append(np.r_[parked.tokens, 9].astype(np.int32))
    parking.close()
    assert parking.n_parked == 1 and len(disk.shelved) == 3
    for prompt in prompts:
        assert parking.fetch(parking.find(prompt, 0)) is not None
    assert parking.counts.hits == 3 and disk.counts.hits == 2, "RAM is asked first"
    parking.check()


def test_without_a_budget_in_ram_conversations_go_to_the_disk_once(open_disk, state):
    disk = open_disk()
    parking = Parking(ParkingRules(0), lambda: 1 << 40, disk)
    parked = conversation(state, 70)
    for _ in range(2):
        parking.park(state, 0, parked.tokens, {})
        parking.close()
    assert parking.n_parked == 0 and disk.counts.written == 1 and parking.counts.captured == 1

"""Rows of a table in a mapped file that the processor brings: the bits of one that the card reads, in time or never."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from strata.kernels.cpu.mapped_rows import RowServer
from strata.kernels.cuda import compile, mapped_rows
from strata.kernels.cuda.mapped_rows import OWN_WORDS, MappedRows, dequantize_mapped
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.reference.linear import dequantize
from strata.kernels.row_desk import ANSWERED, ASKED, COUNT, MOST_ROWS, RowDesk

from .conftest import aligned

ROWS = 1000
WHERE = [pytest.param("host", id="emulated"), pytest.param("device", marks=pytest.mark.gpu, id="card")]
anywhere = pytest.mark.parametrize("where", WHERE)


class Mapped:
    """A table in a file, its desk and its server."""

    def __init__(self, place, where: str, w: Weight, path, served: bool = True, limit_s: float = 60.0) -> None:
        self.place, self.w = place, w
        path.write_bytes(np.ascontiguousarray(w.data).tobytes())
        self.file = np.memmap(path, np.uint8, "r", shape=w.data.shape)
        self.desk = RowDesk.within(pinned(where, RowDesk.n_bytes(w.data.shape[1])), w.data.shape[1])
        own = place.upload(np.zeros(OWN_WORDS, np.uint32))
        self.table = MappedRows(w.type, w.shape, self.file, self.desk, own, limit_s)
        self.server = RowServer(self.desk, Weight(w.type, w.shape, self.file))
        if served:
            self.server.start()

    def rows(self, ids: np.ndarray) -> np.ndarray:
        found = dequantize_mapped(self.place.workspace(), self.table, self.place.upload(ids))
        return self.place.download(found)


def pinned(where: str, n_bytes: int) -> np.ndarray:
    if where == "host":
        return aligned(np.zeros(n_bytes, np.uint8))
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)


@pytest.fixture
def place(request, where, monkeypatch):
    found = request.getfixturevalue(where)
    if where == "host":
        monkeypatch.setattr(compile, "load_kernel", request.getfixturevalue("host_loader"))
    return found


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q8_0", "F32", "BF16"])
@anywhere
def test_rows_have_the_bits_of_the_file_however_many_are_asked_for(place, where, random_weight, tmp_path, kind):
    w = random_weight(kind, ROWS, 160)
    mapped = Mapped(place, where, w, tmp_path / "table")
    for request, n in enumerate((1, 16, 128, 1001)):
        ids = np.random.default_rng(n).integers(0, ROWS, n)
        np.testing.assert_array_equal(mapped.rows(ids), dequantize(w, ids))
        assert mapped.desk.words[ASKED] == mapped.desk.words[ANSWERED] == request + 1
    assert not mapped.desk.failed and not mapped.server.wrong and mapped.server.copied == 1 + 16 + 128 + 1001
    mapped.server.stop()


@anywhere
def test_a_prompt_asks_in_pieces_and_every_piece_has_its_own_rows(place, where, random_weight, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_rows, "MOST_ROWS", 48)
    w = random_weight("IQ4_NL", ROWS, 160)
    mapped = Mapped(place, where, w, tmp_path / "table")
    ids = np.random.default_rng(2).integers(0, ROWS, 48 * 3 + 5)
    np.testing.assert_array_equal(mapped.rows(ids), dequantize(w, ids))
    assert mapped.desk.words[ASKED] == 4 and MOST_ROWS % 16 == 0
    mapped.server.stop()


@anywhere
def test_a_processor_that_does_not_answer_ends_the_wait_once_and_gives_zeros(place, where, random_weight, tmp_path):
    mapped = Mapped(place, where, random_weight("Q8_0", ROWS, 160), tmp_path / "table", served=False, limit_s=0.05)
    begun = time.perf_counter()
    assert not mapped.rows(np.arange(16)).any() and mapped.desk.failed
    assert time.perf_counter() - begun >= 0.05
    mapped.table = MappedRows(*(getattr(mapped.table, name) for name in ("type", "shape", "data", "desk", "own")), 60.0)
    assert not mapped.rows(np.arange(16)).any(), "nothing waits again"


def test_rows_that_the_table_does_not_have_are_counted_and_nothing_is_read_for_them(host, random_weight, tmp_path):
    w = random_weight("Q8_0", 8, 160)
    desk = RowDesk.within(aligned(np.zeros(RowDesk.n_bytes(w.data.shape[1]), np.uint8)), w.data.shape[1])
    server = RowServer(desk, w)
    server.start()
    desk.ids[:4] = 7, 8, -1, 0
    desk.words[COUNT] = 4
    desk.words[ASKED] = 1
    while desk.words[ANSWERED] != 1:
        time.sleep(0.001)
    server.stop()
    assert server.wrong == 2 and server.copied == 4
    np.testing.assert_array_equal(desk.rows[[0, 3]], np.asarray(w.data)[[7, 0]])


def test_the_thread_ends_with_its_server(random_weight):
    w = random_weight("Q8_0", 8, 160)
    desk = RowDesk.within(aligned(np.zeros(RowDesk.n_bytes(w.data.shape[1]), np.uint8)), w.data.shape[1])
    server = RowServer(desk, w)
    server.start()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "n-gram rows")
    del server
    thread.join(10)
    assert not thread.is_alive() and BY_NAME["Q8_0"] is w.type

"""A pack of the full size as a header over a hole, and a card that only counts."""

from __future__ import annotations

import importlib.util
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from strata.engine.device import cuda
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.meter import Meter
from strata.engine.memory.profile import Profile, encode
from strata.engine.model import resident
from strata.engine.model.model import Model, bind
from strata.engine.model.rows import Rows
from strata.engine.model.stage import Stage
from strata.engine.model.weights import rope_table
from strata.engine.model.window import Layout, Windows
from strata.engine.pack import Pack
from strata.engine.state.slots import StatePool
from strata.kernels.cuda import card, compile
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.sample import MAX_RECENT

HEADERS = Path(__file__).resolve().parents[1] / "pack" / "conftest.py"
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13; the value is Linux's
H100, LAPTOP = Card(90, 132, 227 << 10, 228 << 10), Card(120, 26, 99 << 10, 100 << 10)


def _headers() -> ModuleType:
    name = "strata_test_headers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HEADERS)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SCALARS = """
context_length=262144 embedding_length=2560 attention.head_count=24 attention.head_count_kv=2
attention.key_length=256 attention.value_length=256 rope.dimension_count=64 expert_count=512 expert_used_count=10
expert_feed_forward_length=640 expert_shared_feed_forward_length=640 ssm.conv_kernel=4 ssm.state_size=128
ssm.group_count=16 ssm.time_step_rank=48 ssm.inner_size=6144 full_attention_interval=4 hyper_connection.count=4
hyper_connection.low_rank=320 attention.indexer.head_count=4 attention.indexer.key_length=128
attention.indexer.top_k=2048 ple.ngram_size=3 ple.heads_per_ngram=8 ple.conv_kernel=4 ple.eos_token_id=248044
embedding_length_per_layer_input=160
"""
"""The published geometry."""
LAYERS, EXPERTS, HIDDEN, WIDE, VOCAB, RANK, INTER = 48, 512, 2560, 10240, 248_320, 320, 640
FLOATS = ("norm.weight", "_norm_key.weight", "ssm_a", "ssm_dt.bias", "conv1d.weight", "_conv.weight", "_query.weight")


def write_full_pack(path: Path, experts: str = "IQ3_S", down: str = "IQ4_NL", dense: str = "Q6_K") -> Path:
    """A file of the real geometry whose tensors are a hole: 60 GB that take some kilobytes of disk."""
    header = _geometry(LAYERS)
    header.set("tokenizer.ggml.eos_token_id", "u32", 248046)
    heads = 20011 + 2 * np.arange(16)
    for key, kind, content in (
        ("ple.layers", "i32", [1]),
        ("ple.layer_multipliers", "u64", [3, 5, 7]),
        ("ple.head_vocab_sizes", "u64", heads.tolist()),
        ("ple.head_offsets", "u64", [0, *np.cumsum(heads)[:-1].tolist()]),
    ):
        header.set(f"qwen4exp.{key}", "array", (kind, content))
    add = _adding(header)
    add("token_embd.weight", (VOCAB, HIDDEN), "Q8_0")
    add("output.weight", (VOCAB, HIDDEN), "Q5_K")
    _hyper(add, "output_hc", dense, inject=False)
    for i in range(LAYERS):
        _layer(lambda name, shape, kind, i=i: add(f"blk.{i}.{name}", shape, kind), i, experts, down, dense)
    add("per_layer_token_embd.weight", (int(heads.sum()), 160), "IQ4_NL")
    return header.write(path)


def write_full_draft(path: Path) -> Path:
    """The draft layer of that model, in a file of its own."""
    header = _geometry(LAYERS + 1)
    header.set("qwen4exp.nextn_predict_layers", "u32", 1)
    add = _adding(header)

    def add_own(name: str, shape: tuple[int, ...], kind: str) -> None:
        add(f"blk.{LAYERS}.{name}", shape, kind)

    _layer(add_own, LAYERS - 1, "IQ3_S", "IQ4_NL", "Q6_K")
    _hyper(add_own, "nextn.hc_head", "Q6_K", inject=False)
    add_own("nextn.eh_proj.weight", (HIDDEN, 2 * HIDDEN), "Q6_K")
    add_own("nextn.enorm.weight", (HIDDEN,), "F32")
    add_own("nextn.hnorm.weight", (WIDE,), "F32")
    return header.write(path)


def _geometry(blocks: int) -> Any:
    """A header with what a model and its draft layer have in common."""
    header = _headers().Header()
    header.set("general.architecture", "string", "qwen4exp")
    for pair in SCALARS.split():
        key, _, number = pair.partition("=")
        header.set(f"qwen4exp.{key}", "u32", int(number))
    ratios = [4 if i % 4 == 3 or i == LAYERS else 0 for i in range(blocks)]
    header.set("qwen4exp.block_count", "u32", blocks)
    header.set("qwen4exp.attention.layer_norm_rms_epsilon", "f32", 1e-6)
    header.set("qwen4exp.rope.freq_base", "f32", 1e7)
    header.set("qwen4exp.rope.dimension_sections", "array", ("i32", [11, 11, 10, 0]))
    header.set("qwen4exp.attention.compress_ratios", "array", ("i32", ratios))
    return header


def _adding(header: Any) -> Callable[[str, tuple[int, ...], str], None]:
    return lambda name, shape, kind: header.add(name, shape, "F32" if name.endswith(FLOATS) else kind)


def _hyper(add: Callable[..., None], prefix: str, dense: str, inject: bool = True) -> None:
    add(f"{prefix}_norm.weight", (WIDE,), "F32")
    add(f"{prefix}_down.weight", (RANK, WIDE), dense)
    add(f"{prefix}_up.weight", (WIDE, RANK), "Q8_0")
    if inject:
        add(f"{prefix}_inject.weight", (4, WIDE), dense)


def _layer(add: Callable[..., None], i: int, experts: str, down: str, dense: str) -> None:
    for part in ("attn", "ffn"):
        _hyper(add, f"hc_{part}", dense)
    if i % 4 == 3:
        for name, rows in (("q", 12288), ("k", 512), ("v", 512)):
            add(f"attn_{name}.weight", (rows, HIDDEN), dense)
        add("attn_output.weight", (HIDDEN, 6144), dense)
        for name, width in (("attn_q", 256), ("attn_k", 256), ("indexer.q", 128), ("indexer.k", 128)):
            add(f"{name}_norm.weight", (width,), "F32")
        add("indexer.q_proj.weight", (512, HIDDEN), "BF16")
        add("indexer.k_proj.weight", (128, HIDDEN), "BF16")
    else:
        for name, rows in (("attn_qkv", 10240), ("attn_gate", 6144), ("ssm_beta", 48), ("ssm_alpha", 48)):
            add(f"{name}.weight", (rows, HIDDEN), dense)
        add("ssm_a", (48,), "F32")
        add("ssm_dt.bias", (48,), "F32")
        add("ssm_conv1d.weight", (10240, 4), "F32")
        add("ssm_norm.weight", (128,), "F32")
        add("ssm_out.weight", (HIDDEN, 6144), dense)
    if i == 1:
        add("ple_key.weight", (WIDE, HIDDEN), dense)
        add("ple_value.weight", (HIDDEN, HIDDEN), dense)
        for name in ("key", "query", "conv"):
            add(f"ple_norm_{name}.weight", (WIDE,), "F32")
        add("ple_conv1d.weight", (WIDE, 4), "F16")
    add("ffn_gate_inp.weight", (EXPERTS, HIDDEN), "F32")
    add("ffn_gate_inp_shexp.weight", (1, HIDDEN), "F32")
    for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
        add(f"ffn_{name}_exps.weight", (EXPERTS, *shape), down if name == "down" else experts)
        add(f"ffn_{name}_shexp.weight", shape, "Q8_0")


@pytest.fixture(scope="session")
def full_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of the published geometry, 61.8 GB long."""
    return write_full_pack(tmp_path_factory.mktemp("full") / "full.gguf")


@pytest.fixture(scope="session")
def full_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its draft layer."""
    return write_full_draft(tmp_path_factory.mktemp("draft") / "draft.gguf")


@pytest.fixture(scope="session")
def full_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An order of all its experts."""
    pairs = tuple((layer, expert) for expert in range(EXPERTS) for layer in range(LAYERS))
    path = tmp_path_factory.mktemp("profile") / "hot.strp"
    path.write_bytes(encode(Profile(LAYERS, EXPERTS, 0, pairs)))
    return path


class _Graph:
    def launch(self) -> None: ...


class _Event:
    def record(self) -> None: ...
    def wait(self) -> None: ...


class CountingDriver:
    """A card of 96 GiB whose memory is only addresses: nothing is copied, no kernel runs. locked: bytes of RAM."""

    name = "counting card"
    locked = 0

    def memory(self) -> tuple[int, int]:
        return 96 << 30, 96 << 30

    def allocate(self, n_bytes: int) -> np.ndarray:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        return np.frombuffer(mmap.mmap(-1, n_bytes + mmap.PAGESIZE, flags=flags), np.uint8)[:n_bytes]

    def pinned(self, n_bytes: int) -> np.ndarray:
        self.locked += n_bytes
        return self.allocate(n_bytes)

    def event(self) -> _Event:
        return _Event()

    def precompile(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def capture(self, work: Callable[[], None]) -> _Graph:
        work()
        return _Graph()

    def uploader(self) -> CountingDriver:
        return self

    def mapped(self, host: np.ndarray) -> np.ndarray:
        return host

    def downloader(self, *_: Any) -> Callable[[], None]:
        return lambda: None

    def _nothing(self, *_: Any) -> None: ...

    def fetch(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    upload = repack = download = copy = zero = synchronize = finish = wait_for = _nothing


WALKED = 5
"""Layers of a counted pass: one of every kind behind every other that it follows, as bytes of a workspace go."""
_whole_pass = Stage.__call__


def _short_pass(stage: Stage, x: Any, rows: Rows, state: StatePool) -> None:
    _whole_pass(Stage(stage.device, stage.layers[:WALKED]), x, rows, state)


@contextmanager
def _figures(figures: Card, whole: bool) -> Iterator[None]:
    """whole: passes go through all layers, which takes most of a counted start. The soak's do."""
    with (
        mock.patch.object(card, "card", lambda: figures),
        mock.patch.object(Stage, "__call__", _whole_pass if whole else _short_pass),
        compile.collecting(),
    ):
        yield


@pytest.fixture
def whole_passes(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("soak") is not None


class Counts(int):
    """Bytes of a workspace. parts: what lives for a whole pass, what blocks of layers work in."""

    parts: tuple[int, ...]


@pytest.fixture
def counted(whole_passes: bool) -> Callable[..., dict[int, Counts]]:
    """counted(pack, context, chunks, kv=.., figures=..) -> bytes of the workspace that the kernels' wrappers really
    take for chunks of so many rows; 0 rows: for windows. whole: of passes through all layers."""

    def count(
        pack: Pack,
        context: int,
        chunks: list[int],
        kv: str = "fp32",
        figures: Card = H100,
        mixer_rows: int = 0,
        whole: bool = whole_passes,
    ) -> dict[int, Counts]:
        passes, found = CountedPasses(pack, context, kv, figures, mixer_rows, whole), dict[int, Counts]()
        for chunk in chunks:
            passes.fit(chunk)
            found[chunk] = Counts(passes.device.workspace_bytes)
            found[chunk].parts = tuple(space.capacity for space in passes.device._spaces[:2])
        return found

    return count


class CountedPasses:
    """Passes of a pack on a card that only counts."""

    def __init__(
        self, pack: Pack, context: int, kv: str = "fp32", figures: Card = H100, mixer_rows: int = 0, whole: bool = False
    ) -> None:
        self.device, meter = CudaDevice(driver=CountingDriver()), Meter(2)
        self.device.mixer_rows = mixer_rows
        bind(pack, meter, rope_table(pack.spec, context, meter))
        StatePool(pack.spec, 1, context, kv=kv, memory=meter)
        self.device.open("weights", meter.weights + meter.table_bytes, "")
        self.device.open("state", meter.state, "")
        self._model = Model(pack, self.device, context)
        self._state = self._model.new_state(1, kv)
        self._windows = Windows(self._model, self._state, self.device, 8)
        self._how = figures, whole

    def fit(self, chunk: int) -> None:
        """A workspace for a chunk of so many rows; 0: for windows."""
        with _figures(*self._how):
            assert self.device.fit(lambda: self.run(chunk), 0)

    def run(self, chunk: int) -> None:
        """Such a pass in it."""
        with _figures(*self._how):
            if not chunk:
                self._windows.rehearse(Layout(8, 8, 8, MAX_RECENT))
                return
            self._state.reserve(0, chunk)
            self.device.expect(None)
            rows = Rows.of([(0, 0, np.zeros(chunk, np.int32))])
            placed = self._state.located(rows).placed(self.device)
            self._model.compute(placed, self._state, np.arange(chunk - 1, chunk))
            self._state.reset(0)


@pytest.fixture
def counting(whole_passes: bool) -> Iterator[object]:
    """A driver that only counts."""
    with _figures(H100, whole_passes):
        yield CountingDriver()


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads nothing from the file, on a machine with all the RAM that one can want."""
    monkeypatch.setattr(cuda, "Loading", mock.Mock())
    monkeypatch.setattr(resident, "ram", lambda: Memory(1 << 40, 1 << 40))


@pytest.fixture(params=["counting", pytest.param("card", marks=pytest.mark.gpu)])
def counting_or_card(request: pytest.FixtureRequest, whole_passes: bool) -> Iterator[object]:
    """A driver that only counts, and a real card's if asked to."""
    if request.param == "card":
        yield request.getfixturevalue("new_card")()
        return
    with _figures(H100, whole_passes):
        yield CountingDriver()


@pytest.fixture
def cards() -> SimpleNamespace:
    return SimpleNamespace(h100=H100, laptop=LAPTOP)

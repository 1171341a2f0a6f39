"""A card as the device of a stage: arenas for weights and state, a workspace, fixed buffers for rows.

    device = CudaDevice(limit_mib=8151)
    device.open("weights", n_bytes)          # then `weight`, `table`, `put`
    device.open("state", n_bytes)            # then `zeros`
    device.load()                            # bytes of the weights, in the background until `loaded`
    device.fit(run, reserve)                 # a workspace of exactly what `run` needs

Memory   every byte comes from an arena that was opened by name and counted; after `seal` nothing else is allocated
Stream   one, not the default stream; work happens in the order of the calls
Blocks   the workspace has two parts: what lives for a whole pass, and what blocks of a layer work in, one after the
         other in the same bytes. What a block leaves for the next one to add to the residual is kept in the first part.
         Blocks of windows overlap: they take halves of the second part in turn, and leave it there
Units    bytes, MiB where the name says so
Errors   DeviceError: no CuPy, driver or card; memory that is not there, with the flag that helps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import ALIGNMENT, MIB, Account, Arena, padded
from strata.engine.device.base import MAX_ROWS, Bytes, Memory
from strata.engine.device.driver import Array, CupyDriver, Driver
from strata.engine.device.loading import Copy, Loading, flat
from strata.engine.device.mapped_table import MappedTable
from strata.engine.log import log
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.mapped_rows import OWN_WORDS
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.cuda.product import linear
from strata.kernels.cuda.repack import card_form
from strata.kernels.cuda.workspace import OutOfWorkspace, Workspace
from strata.kernels.formats import Weight
from strata.kernels.ops import AttentionPages, Gdn, Hyper, Moe, Norms, Rope

TablePlace = Literal["vram", "ram", "mmap"]
"""Where the n-gram table lies: on the card, in page-locked RAM, in the mapped file."""
STAGING: Final = 8
"""Small copies that may be under way at once."""
MOST_WORKSPACE: Final = 16 << 30
"""Bytes of a workspace at most: 8,192 rows of the largest model take a fifth of it."""
PIECES: Final = 8
"""Sizes that are tried for it."""
_COUNTERS: Final = 64 << 10
"""Bytes of what the kernels keep beside the workspace."""
_ROW_INTS: Final = 6
"""Numbers that describe a row: token, position, slot and, at most, a segment of its own."""
TABLES: Final = _COUNTERS + 4 * MAX_ROWS * _ROW_INTS
"""Bytes that a device takes before all else."""


class Staging:
    """Small copies to the card through page-locked buffers used in turn."""

    def __init__(self, driver: Driver, n_bytes: int) -> None:
        self._driver = driver
        self._buffers = [driver.pinned(n_bytes) for _ in range(STAGING)]
        self._events = [driver.event() for _ in range(STAGING)]
        self._sent = 0

    def upload(self, target: Array, values: npt.NDArray[Any]) -> None:
        """Queue a copy; `values` may change at once."""
        turn = self._sent % STAGING
        if self._sent >= STAGING:
            self._events[turn].wait()
        self._sent += 1
        buffer = self._buffers[turn][: values.nbytes]
        buffer[:] = flat(np.ascontiguousarray(values))
        self._driver.upload(target, buffer)
        self._events[turn].record()


class DeviceMirror:
    """A host array of int32 and its copy on the card."""

    def __init__(self, host: npt.NDArray[np.int32], array: Array, driver: Driver) -> None:
        self.host = host
        self.array = array
        self._staging = Staging(driver, host.nbytes)
        self.update()

    def update(self) -> None:
        self._staging.upload(self.array, self.host)


class Tiers(Protocol):
    """Where experts lie that do not all fit. hits: of the rows of the last window, int32 (2, rows): picks in the cache,
    and picks that the processor computed."""

    hits: Array

    def bind(self, layer: int, stacks: Sequence[Weight]) -> Sequence[Weight]: ...
    def load(self) -> None: ...
    def loaded(self) -> None: ...
    def close(self) -> None: ...


class Lender(Protocol):
    """Where the output matrix lies that is not among the weights."""

    def bind(self, w: Weight) -> Weight: ...


class CudaDevice:
    """The card in use. `driver`: tests put one without hardware here."""

    sides = 2

    def __init__(self, limit_mib: int = 0, driver: Driver | None = None) -> None:
        self.driver = driver or CupyDriver()
        self.name = self.driver.name
        self.account = Account(self.driver, limit_mib * MIB)
        self._arenas: dict[str, Arena] = {}
        self._copies: list[Copy] = []
        self._loading: Loading | None = None
        self._counters = Workspace(self._take(_COUNTERS, "counters of the kernels"))
        self.kernels = CudaKernels(self._counters)
        self.mixer_rows = 0
        self._spaces: list[Workspace] = []
        self._kept: tuple[Array, Array] | None = None
        self._turn = self._side = 0
        self._tape: Workspace | None = None
        self.workspace_bytes = 0
        self.table_place: TablePlace = "vram"
        self._mapped: MappedTable | None = None
        self.tiers: Tiers | None = None
        self.lender: Lender | None = None
        self.card_forms = False
        ints = MAX_ROWS * _ROW_INTS
        self._rows = self._take(4 * ints, "rows").view(np.int32)
        self._staging = Staging(self.driver, 4 * ints)

    # -------------------------------------------------------------------------------------------------------- memory

    def memory(self) -> Memory:
        return self.account.memory()

    def open(self, name: str, n_bytes: int, remedy: str) -> None:
        """Take an arena of n bytes, all zero: "weights" or "state". Raises DeviceError with the remedy."""
        memory = self._take(n_bytes, f"the {name}", remedy)
        self.driver.zero(memory)
        self._arenas[name] = Arena(memory, f"the arena of the {name}")

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        return self._arenas["state"].array(shape, dtype)

    def far(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """Page-locked RAM that the card reads over PCIe."""
        host = self.driver.pinned(max(prod(shape), 1) * np.dtype(dtype).itemsize)
        return self.driver.mapped(host).view(dtype)[: prod(shape)].reshape(shape)

    def fill(self, array: Array, value: float) -> None:
        if value == 0:
            self.driver.zero(array)
        else:
            self._staging.upload(array, np.full(array.shape, value, array.dtype))

    def mirror(self, shape: tuple[int, ...], value: int) -> DeviceMirror:
        host = np.full(shape, value, np.int32)
        return DeviceMirror(host, self._arenas["state"].array(shape, np.int32), self.driver)

    def fixed(self, n_bytes: int) -> Array:
        """uint8 (n_bytes,) of zeros at an address that never changes, outside of the arenas."""
        array = self._take(padded(n_bytes), "fixed buffers")
        self.driver.zero(array)
        return array[:n_bytes]

    def copy(self, target: Array, source: Array) -> None:
        self.driver.copy(target, source)

    def read(self, array: Array) -> npt.NDArray[Any]:
        return self.driver.fetch(array)

    def download(self, target: Bytes, source: Array) -> None:
        self.driver.download(target, source)
        self.driver.synchronize()

    def upload(self, target: Array, source: Bytes) -> None:
        self.driver.upload(target, source)
        self.driver.synchronize()

    def seal(self) -> None:
        """Start is over: from now on nothing may allocate."""
        self.driver.seal()

    def _take(self, n_bytes: int, what: str, remedy: str = "free some of it, or use --device host") -> Array:
        return self.account.take(n_bytes, what, remedy)

    # ------------------------------------------------------------------------------------------------------- weights

    def put(self, array: npt.NDArray[Any]) -> Array:
        return self._promised(np.ascontiguousarray(array))

    def weight(self, w: Weight) -> Weight:
        return Weight(w.type, w.shape, self._promised(w.data))

    def output(self, w: Weight) -> Weight:
        """In the weights' arena, or where `lender` puts it."""
        return self.weight(w) if self.lender is None else self.lender.bind(w)

    def experts(self, layer: int, stacks: Sequence[Weight]) -> Sequence[Weight]:
        """Like other matrices, or where `tiers` puts them."""
        return [self.matrix(w) for w in stacks] if self.tiers is None else self.tiers.bind(layer, stacks)

    def matrix(self, w: Weight) -> Weight:
        """In its card form, if `card_forms` and there is one."""
        form = card_form(w.type, w.cols) if self.card_forms else None
        if form is None:
            return self.weight(w)
        target = self._arenas["weights"].array((*w.shape[:-1], form.row_bytes(w.cols)), np.uint8)
        self._copies.append(Copy(flat(w.data), target.reshape(-1), kind=w.type))
        return Weight(form, w.shape, target)

    def table(self, w: Weight) -> Weight:
        """The table in the weights' arena, in page-locked RAM that the card reads over PCIe, or in its mapped file."""
        if self.table_place == "vram":
            return self.weight(w)
        if self.table_place == "mmap":
            self._mapped = MappedTable(self.driver, self.fixed(4 * OWN_WORDS).view(np.uint32), w)
            return self._mapped.weight
        host = self.driver.pinned(w.data.nbytes)
        self._copies.append(Copy(flat(w.data), host, host=True))
        return Weight(w.type, w.shape, self.driver.mapped(host).reshape(w.data.shape))

    def promise(self, copy: Copy) -> None:
        """Bring these bytes with the weights."""
        self._copies.append(copy)

    def _promised(self, source: npt.NDArray[Any]) -> Array:
        target = self._arenas["weights"].array(source.shape, source.dtype)
        if target.size:
            self._copies.append(Copy(flat(source), target.reshape(-1).view(np.uint8)))
        return target

    def load(self) -> None:
        """Start to bring the promised bytes, in threads and on streams of their own."""
        self.driver.synchronize()  # the arena is zero before anything lands in it
        self._loading = Loading(self.driver, self._copies)
        self._copies = []
        if self.tiers is not None:
            self.tiers.load()

    def loaded(self) -> None:
        """Until they are there."""
        if self._loading is not None:
            self._loading.wait()
        self._loading = None
        if self.tiers is not None:
            self.tiers.loaded()

    def check(self) -> None:
        """A pass is over. Raises DeviceError when it waited in vain for rows of a mapped table."""
        if self._mapped is not None:
            self._mapped.check()

    def close(self) -> None:
        """Stop what runs beside the caller: after a failed start."""
        if self._loading is not None:
            self._loading.cancel()
        self._loading = None
        if self._mapped is not None:
            self._mapped.close()
        if self.tiers is not None:
            self.tiers.close()

    # ----------------------------------------------------------------------------------------------------- workspace

    def fit(self, runs: Callable[[], None], reserve: int, share: float = 0.5) -> bool:
        """Take a workspace of just what `runs`, forward passes of the largest shapes, need; False: there is no room.

        They happen here in what memory there is but `reserve`, at most MOST_WORKSPACE, on contents that mean nothing:
        what takes turns lies in the same bytes. Arrays of passes before become invalid. share: of these bytes, for what
        lives for a whole pass.
        """
        self.use([])
        self.account.give(self.workspace_bytes)
        self.workspace_bytes = 0
        within = self.memory().free - reserve
        memory = self._most(min(within, MOST_WORKSPACE) // (2 * ALIGNMENT) * (2 * ALIGNMENT))
        if memory is None:
            return False
        room = int(memory.size)
        peaks = self._peaks(memory, runs, share)
        del memory
        self.account.give(room)
        memory = None if peaks is None or sum(peaks) > within else self._most(sum(peaks), tries=1)
        if peaks is None or memory is None:
            return False
        self.workspace_bytes = sum(peaks)
        self.use(_cut(memory, peaks))
        return True

    def _most(self, n_bytes: int, tries: int = PIECES) -> Array | None:
        """A piece of so many bytes for the workspace; where the card does not give it, one of three quarters, and so
        on. None: none of them is there."""
        for _ in range(tries):
            if n_bytes <= 0:
                return None
            try:
                return self._take(n_bytes, "the workspace")
            except DeviceError as error:
                log(str(error))
            n_bytes = n_bytes * 3 // 4 // (2 * ALIGNMENT) * (2 * ALIGNMENT)
        return None

    def fit_in(self, memory: Array, runs: Callable[[], None], share: float) -> list[Array] | None:
        """The same in memory of the caller: the parts that are in use now; None: it is too small."""
        peaks = self._peaks(memory, runs, share)
        if peaks is None or sum(peaks) > memory.size:
            return None
        parts = _cut(memory, peaks)
        self.use(parts)
        return parts

    def _peaks(self, memory: Array, runs: Callable[[], None], share: float) -> list[int] | None:
        """What `runs` need of each part; None: more than there is."""
        edge = int(memory.size * share) // ALIGNMENT * ALIGNMENT
        self._enter(memory[:edge], *[memory[edge:]] * 3)
        try:
            runs()
            fits = True
        except OutOfWorkspace:
            fits = False
        self.driver.synchronize()
        whole, work, *halves = (space.peak for space in self._spaces)
        self.use([])
        return [whole, max(work, 2 * max(halves))] if fits else None

    def use(self, parts: list[Array]) -> None:
        """Passes from now on lie in these parts: the whole pass's and that of blocks. Arrays of passes before become
        invalid."""
        if not parts:
            self._enter()
            return
        whole, work = parts
        half = int(work.size) // (2 * ALIGNMENT) * ALIGNMENT
        self._enter(whole, work, work[:half], work[half:])

    def _enter(self, *parts: Array) -> None:
        self._spaces = [Workspace(part) for part in parts]
        self._kept = None
        self.kernels.workspace = self._spaces[0] if parts else self._counters

    def expect(self, bound: int | None) -> None:
        self.kernels.bound = bound

    def begin(self) -> None:
        self._spaces[0].release(0)
        self._kept = None
        self.kernels.workspace = self._spaces[0]

    @property
    def taken(self) -> int:
        """What the pass so far holds of its workspace, for `replayed`."""
        return self._spaces[0].mark()

    def replayed(self, taken: int) -> None:
        """A captured pass runs again: what it had taken is in use, as after the pass itself."""
        self._spaces[0].resume(taken)
        self.kernels.workspace = self._spaces[0]

    # Of more rows than those of windows no kernel is early (kernels/cuda/src/intrinsics.cuh): each writes when all
    # before it have ended, so a block may write where the one before it still works when its first kernel is launched.
    # What that kernel reads before its predecessor has ended are the residual and the beta before: neither lies in the
    # part of blocks, and a block's beta never lies where that of the block before it does. Copies to the ring go to
    # memory of its own. Kernels of windows may be early: what they write must not be what a block before still reads.

    def turn(self, rows: int = 0) -> None:
        if rows > WINDOW_ROWS:
            space = self._spaces[1]
        else:
            self._turn = 1 - self._turn
            space = self._spaces[2 + self._turn]
        space.release(0)
        self.kernels.workspace = space

    def kept(self, x: Array) -> tuple[Array, Array] | None:
        n, streams, width = x.shape
        if n <= WINDOW_ROWS:
            return None
        if self._kept is None or len(self._kept[1]) < n:
            whole = self._spaces[0]
            self._kept = whole.array((2, n, streams)), whole.array((n, width))
        self._side = 1 - self._side
        betas, y = self._kept
        return betas[self._side, :n], y[:n]

    def rest(self) -> None:
        self.kernels.workspace = self._spaces[0]

    def open_tape(self, n_bytes: int) -> None:
        """Take memory for what a tape keeps."""
        self._tape = Workspace(self._take(padded(n_bytes), "the tape of verify windows", "use a smaller --spec"))

    @property
    def tape(self) -> Workspace:
        if self._tape is None:
            raise RuntimeError("a tape is written that nobody has opened")
        return self._tape

    def rewind(self) -> None:
        self.tape.release(0)

    # ---------------------------------------------------------------------------------------------------- operations

    def project(self, weights: Sequence[Weight], x: Array) -> Sequence[Array]:
        outs = [self.tape.array((len(x), w.rows)) for w in weights]
        return linear(self.kernels.workspace, weights, x, out=outs)

    def place(self, arrays: Sequence[npt.NDArray[np.int32]]) -> Sequence[Array]:
        """In one fixed buffer, which the next call overwrites in the order of the stream."""
        edges = np.cumsum([0, *map(len, arrays)]).tolist()
        self._staging.upload(self._rows[: edges[-1]], np.concatenate(arrays))
        return [self._rows[begin:end] for begin, end in pairwise(edges)]

    def embed(self, table: Weight, tokens: Array, streams: int) -> Array:
        return self.kernels.embed(table, tokens, streams)

    def mix(
        self, x: Array, hc: Hyper, eps: float, added: tuple[Array, Array] | None, out: Array | None = None
    ) -> tuple[Array, Array | None]:
        if added is None:
            return self.kernels.hyper_mix(x, hc, eps, out)
        return self.kernels.hyper_add_mix(x, *added, hc, eps, out)

    def leave(self, w: tuple[Weight], x: Array, out: Array | None = None) -> Array:
        return self.kernels.linear(w, x, None if out is None else [out])[0]

    def moe(self, w: Moe, x: Array, used: int, out: Array | None = None) -> Array:
        return self.kernels.moe(w, x, used, out)

    def delta_net(
        self,
        project: Sequence[Weight],
        w: Gdn,
        u: Array,
        segments: Array,
        conv: Array,
        state: Array,
        eps: float,
    ) -> Array:
        return self.kernels.delta_net(project, w, u, segments, conv, state, eps)

    def attention(
        self,
        project: Sequence[Weight],
        u: Array,
        pages: AttentionPages,
        where: tuple[Array, Array, Array],
        heads: tuple[int, int, int],
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> Array:
        return self.kernels.attention(project, u, pages, where, heads, norms, rope, budget, eps)

    def take(self, x: Array, rows: npt.NDArray[np.int64]) -> Array:
        if len(rows) and (np.diff(rows) == 1).all():
            return x[int(rows[0]) : int(rows[-1]) + 1]
        taken = self.kernels.workspace.array((len(rows), *x.shape[1:]), x.dtype)
        for i, row in enumerate(rows.tolist()):
            self.driver.copy(taken[i], x[row])
        return taken


def _cut(memory: Array, sizes: Sequence[int]) -> list[Array]:
    """Pieces of these sizes, one behind the other."""
    return [memory[begin:end] for begin, end in pairwise(np.cumsum([0, *sizes]).tolist())]

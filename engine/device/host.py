"""The host as a device: which kernels compute, on how many threads, and how much memory there is.

Units    bytes
Errors   ValueError for an unknown backend or a thread count below 1
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import Array, Bytes, Memory
from strata.kernels.formats import Weight
from strata.kernels.ops import AttentionPages, Gdn, Hyper, Kernels, Moe, Norms, Rope

BACKENDS: Final = ("cpu", "reference")
MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, eq=False)
class HostMirror:
    """The kernels see the host array itself."""

    host: npt.NDArray[np.int32]

    @property
    def array(self) -> Array:
        return self.host

    def update(self) -> None:
        """Nothing to do."""


class HostMemory:
    """State in RAM, as NumPy arrays."""

    sides = 1

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        return np.zeros(shape, dtype)

    def far(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        return np.zeros(shape, dtype)

    def fill(self, array: Array, value: float) -> None:
        array[...] = value

    def mirror(self, shape: tuple[int, ...], value: int) -> HostMirror:
        return HostMirror(np.full(shape, value, np.int32))

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def read(self, array: Array) -> npt.NDArray[Any]:
        return np.array(array)

    def download(self, target: Bytes, source: Array) -> None:
        target[...] = source.reshape(-1).view(np.uint8)

    def upload(self, target: Array, source: Bytes) -> None:
        target.reshape(-1).view(np.uint8)[...] = source


class HostDevice(HostMemory):
    """The processor with its RAM. `kernels` is the backend module; its threads are bounded here, once.

    Weights stay views of the mapped file; what operations make are new arrays.
    """

    mixer_rows = 0

    def __init__(self, kernels: Literal["cpu", "reference"] = "cpu", threads: int = 1) -> None:
        if kernels not in BACKENDS:
            raise ValueError(f"kernels must be one of {', '.join(BACKENDS)}, got {kernels!r}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.name = f"host ({kernels})"
        self.threads = threads
        self.kernels = cast(Kernels, import_module(f"strata.kernels.{kernels}"))
        self.kernels.set_threads(threads)

    def memory(self) -> Memory:
        return ram()

    def put(self, array: npt.NDArray[Any]) -> Array:
        return array

    def weight(self, w: Weight) -> Weight:
        return w

    def output(self, w: Weight) -> Weight:
        return self.weight(w)

    def matrix(self, w: Weight) -> Weight:
        return self.weight(w)

    def experts(self, layer: int, stacks: Sequence[Weight]) -> Sequence[Weight]:
        return [self.weight(w) for w in stacks]

    def table(self, w: Weight) -> Weight:
        return w

    def place(self, arrays: Sequence[npt.NDArray[np.int32]]) -> Sequence[Array]:
        return arrays

    def expect(self, bound: int | None) -> None:
        """Nothing to do: the kernels look at the positions."""

    def begin(self) -> None:
        """Nothing to do, as for `turn` and `rest`: arrays live as long as somebody holds them."""

    def turn(self, rows: int = 0) -> None: ...

    def kept(self, x: Array) -> tuple[Array, Array] | None:
        return None

    def rest(self) -> None: ...

    def rewind(self) -> None: ...

    def project(self, weights: Sequence[Weight], x: Array) -> Sequence[Array]:
        return self.kernels.linear(weights, x)

    def embed(self, table: Weight, tokens: Array, streams: int) -> Array:
        e = self.kernels.dequantize(table, tokens.astype(np.int64))
        return np.repeat(e[:, None, :], streams, axis=1)

    def mix(
        self, x: Array, hc: Hyper, eps: float, added: tuple[Array, Array] | None, out: Array | None = None
    ) -> tuple[Array, Array | None]:
        if added is not None:
            self.kernels.hyper_add(x, *added)
        return self.kernels.hyper_mix(x, hc, eps)

    def leave(self, w: tuple[Weight], x: Array, out: Array | None = None) -> Array:
        return self.kernels.linear(w, x)[0]

    def moe(self, w: Moe, x: Array, used: int, out: Array | None = None) -> Array:
        return self.kernels.moe(w, x, used)

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
        p, z, b, a = self.kernels.linear(project, u)
        return self.kernels.gdn(w, p, z, b, a, segments, conv, state, eps)

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
        q_gate, k, v, index_q, index_k = self.kernels.linear(project, u)
        kv, n = (len(u), heads[1], -1), len(u)
        self.kernels.qsa_store(pages, *where, k.reshape(kv), v.reshape(kv), index_k, norms, rope, eps)
        asked = (q_gate.reshape(n, heads[0], 2, -1), index_q.reshape(n, heads[2], -1))
        return self.kernels.qsa_attend(pages, *where, *asked, norms, rope, budget, eps)

    def take(self, x: Array, rows: npt.NDArray[np.int64]) -> Array:
        return x[rows]


def ram() -> Memory:
    """RAM: all of it, and what can be had without pushing anything out.

    What the kernel says now; on a system without /proc/meminfo, what the C library says.
    """
    return read_meminfo(MEMINFO) or _from_sysconf()


def read_meminfo(path: Path) -> Memory | None:
    """MemTotal and MemAvailable of a meminfo file, None when there is no such file or it lacks them."""
    if not path.is_file():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return None
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return Memory(total, free)


def _from_sysconf() -> Memory:
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total
    return Memory(total * page, free * page)

"""Launches that overlap: the driver gets the arguments where C puts them (what kernels wait for: test_compile.py)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import kernel
from strata.kernels.cuda.compile import SOURCES


def test_kernels_of_prompts_are_not_held_to_half_of_the_shared_memory():
    prompts = "product_prompt lanes_prompt lanes_thin gdn_scan qsa_prompt_keys qsa_prompt_values qsa_score_tile"
    texts = " ".join(path.read_text() for path in SOURCES.glob("*.cu"))
    for name in prompts.split():
        assert f"{name}(" in texts, "renamed: its new name must say that it is of prompts"
        assert not kernel.of_window(name)
    assert kernel.of_window("product_row") and kernel.of_window("qsa_values")


def test_older_cards_and_drivers_launch_one_after_the_other():
    assert kernel.overlaps(90, 12030, {}) and kernel.overlaps(120, 13000, {kernel.OVERLAP: "1"})
    assert not kernel.overlaps(89, 13000, {}) and not kernel.overlaps(90, 12020, {})
    assert not kernel.overlaps(90, 13000, {kernel.OVERLAP: "0"})


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [(f"size{i}", ctypes.c_uint) for i in range(6)] + [
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n", ctypes.c_uint),
    ]


def test_the_driver_reads_the_launch_that_was_meant():
    packed = kernel._CONFIG.pack(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert len(packed) == ctypes.sizeof(Config)
    config = Config.from_buffer_copy(packed)
    sizes = [getattr(config, f"size{i}") for i in range(6)]
    assert (*sizes, config.shared, config.stream, config.attributes, config.n) == tuple(range(1, 11))
    assert len(kernel._ATTRIBUTE.pack(6, 1)) == 72  # a number, then a union of 64 bytes at a multiple of 8


KINDS = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.float32: ctypes.c_float, np.uint64: ctypes.c_ulonglong}


@given(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(0, 1 << 20)), max_size=20))
def test_arguments_arrive_as_they_were_given(values: list[tuple[type, int]]):
    given_values = tuple(kind(value) for kind, value in values)
    arguments = kernel._Arguments(given_values)
    arguments.packed(given_values)
    for place, value in zip(arguments._pointers, given_values, strict=False):
        kind = KINDS[type(value)]
        assert place % ctypes.sizeof(kind) == 0 and kind.from_address(place).value == value


def test_a_struct_and_a_null_pointer_are_passed():
    struct = np.zeros((), np.dtype([("data", np.uint64), ("n", np.int32)], align=True))
    struct["data"], struct["n"] = 1 << 40, 7
    arguments = kernel._Arguments((struct, None))
    arguments.packed((struct, None))
    first, second = arguments._pointers
    assert (
        ctypes.string_at(first, struct.nbytes) == struct.tobytes()
        and ctypes.c_void_p.from_address(second).value is None
    )


class Function:
    """CuPy's function of a kernel."""

    max_dynamic_shared_size_bytes = preferred_shared_memory_carveout = 0

    class kernel:
        ptr = 1


def test_a_launch_is_not_made_with_the_grid_or_the_stream_of_the_one_before(monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[int, ...]] = []

    class Driver:
        @staticmethod
        def cuLaunchKernelEx(config: int, handle: int, pointers: int, extra: None) -> int:
            found = Config.from_address(config)
            shape = [getattr(found, f"size{i}") for i in range(6)]
            launched.append((*shape, found.shared, found.stream or 0))
            return 0

    streams = iter([5, 5, 5, 5, 6])
    monkeypatch.setattr(kernel, "_driver", lambda: Driver)
    tested = kernel.Kernel(Function(), "tested", lambda: next(streams), True)
    for grid, block, shared in [((2,), (32,), 0), ((2,), (32,), 0), ((2, 3), (32,), 0), ((2, 3), (32,), 64)]:
        tested(grid, block, (np.int32(1),), shared_mem=shared)
    tested((2, 3), (32,), (np.int32(1),), shared_mem=64)
    first = (2, 1, 1, 32, 1, 1, 0, 5)
    assert launched == [first, first, (2, 3, *first[2:]), (2, 3, 1, 32, 1, 1, 64, 5), (2, 3, 1, 32, 1, 1, 64, 6)]

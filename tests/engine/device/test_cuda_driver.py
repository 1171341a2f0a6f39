"""A machine whose card cannot be used: each reason is one line that says what to do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from strata.engine.device import driver
from strata.engine.device.driver import CupyDriver
from strata.kernels.cuda.compile import DeviceError


class RuntimeFailure(RuntimeError):
    pass


def cuda(driver_version: object = 12080, devices: object = 1) -> SimpleNamespace:
    """CuPy's runtime module of a machine: a number is an answer, text an error."""

    def answer(value: object) -> object:
        if isinstance(value, str):
            raise RuntimeFailure(value)
        return value

    return SimpleNamespace(
        CUDARuntimeError=RuntimeFailure,
        runtimeGetVersion=lambda: 13020,
        driverGetVersion=lambda: answer(driver_version),
        getDeviceCount=lambda: answer(devices),
    )


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (cuda(driver_version=0), "no NVIDIA driver is loaded; install the driver, or use --device host"),
        (
            cuda(devices="cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"),
            "the NVIDIA driver knows CUDA 12.8, the installed CuPy needs 13.2; update the driver, or install strata",
        ),
        (cuda(devices="cudaErrorNoDevice: no CUDA-capable device"), "no card is visible (CUDA_VISIBLE_DEVICES=7); "),
        (cuda(devices=0), "no card is visible (CUDA_VISIBLE_DEVICES=7); nvidia-smi lists the cards of this machine"),
        (cuda(devices="cudaErrorSystemNotReady: fabric"), "CUDA does not start: cudaErrorSystemNotReady: fabric"),
    ],
)
def test_a_card_that_cannot_be_used_is_told_with_the_remedy(monkeypatch, runtime, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError) as refused:
        driver._require_card(runtime)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_usable_card_is_not_refused():
    driver._require_card(cuda())


def test_a_card_too_old_for_the_kernels_is_told_before_a_kernel_is_compiled_for_it():
    with pytest.raises(DeviceError) as refused:
        driver._require_kernels("Tesla V100", (7, 0))
    assert str(refused.value) == (
        "Tesla V100 has compute capability 7.0, the kernels need 7.5 or newer; choose another card with "
        "CUDA_VISIBLE_DEVICES, or use --device host"
    )
    driver._require_kernels("RTX 2080", (7, 5))
    driver._require_kernels("RTX 5090", (12, 0))


def test_without_cupy_the_extras_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"CuPy is not installed .*; install strata\[cuda13\] or strata\[cuda12\]"):
        CupyDriver()

"""Every backend has the operations of the contract, under the same names and with the same arguments."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from strata.kernels.ops import Kernels

OPERATIONS = sorted(name for name, value in vars(Kernels).items() if inspect.isfunction(value) and name[0] != "_")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_backend_lacks_no_operation_and_no_argument(backend):
    module = import_module(f"strata.kernels.{backend}")
    for name in OPERATIONS:
        wanted = list(inspect.signature(getattr(Kernels, name)).parameters)[1:]
        assert list(inspect.signature(getattr(module, name)).parameters) == wanted, name


def test_the_contract_has_operations():
    assert {"linear", "gdn", "qsa_attend", "moe", "sample"} <= set(OPERATIONS)

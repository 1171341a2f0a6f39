"""Activations as products want them, left by the kernel that makes them: no block of a product quantises them again.

    hint = forms.leave(workspace, u)      # room, noted beside u; an argument by value (forms.cuh)
    hint = forms.leave_native(...)        # of a prompt
    forms.known(workspace, u, kind)       # what was left, as a weight of this type wants it

Cost   three bytes an input for the orders of all types, and the sums of those with offsets; of a prompt one byte
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.kernels.cuda import plans
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import TensorType
from strata.kernels.ops import ACT_BLOCK

FORMS: Final = np.dtype([(name, np.uint64) for name in ("q", "d", "sums16", "sums32")])
"""Forms of forms.cuh."""
NOTHING: Final = np.zeros((), FORMS)
_ORDERS: Final = ("NATIVE", "EIGHT", "EVEN_ODD")
_GROUPS: Final = (16, 32)


@dataclass(slots=True, eq=False)
class Quantized:
    """Activations as int8 in the order of a type: q (n, cols), d (n, cols / 32), sums (n, cols / group) or None."""

    q: DeviceArray
    d: DeviceArray
    sums: DeviceArray | None


@dataclass(slots=True, eq=False)
class _Left:
    by_type: dict[tuple[str, int], Quantized]


def leave(workspace: Workspace, x: DeviceArray) -> np.ndarray:
    """Room for x (n, cols) in every form, noted beside it until it is given back; the argument of its maker."""
    n, cols = x.shape
    q, d = workspace.array((len(_ORDERS), n, cols), np.uint8), workspace.array((n, cols // ACT_BLOCK))
    sums: dict[int, DeviceArray | None] = {0: None}
    sums |= {group: workspace.array((n, cols // group)) for group in _GROUPS}
    forms = {(order, group): Quantized(q[i], d, s) for i, order in enumerate(_ORDERS) for group, s in sums.items()}
    workspace.leave(x, _Left(forms))
    return np.array(tuple(address(a) for a in (q, d, sums[16], sums[32])), FORMS)


def leave_native(workspace: Workspace, x: DeviceArray) -> np.ndarray:
    """The same in the order of most types and without sums alone: what the products of a prompt mostly want."""
    n, cols = x.shape
    made = Quantized(workspace.array((n, cols), np.uint8), workspace.array((n, cols // ACT_BLOCK)), None)
    workspace.leave(x, _Left({(_ORDERS[0], 0): made}))
    return np.array((address(made.q), address(made.d), 0, 0), FORMS)


def known(workspace: Workspace, x: DeviceArray, kind: TensorType) -> Quantized | None:
    """What the maker of x left of it for weights of this type; None when nothing."""
    left = workspace.left(x)
    return left.by_type.get((plans.order(kind), kind.sums)) if isinstance(left, _Left) else None

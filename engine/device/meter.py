"""A device that holds nothing and counts what a model and its state would take of a card.

The same binding code runs against it, so that the arenas are neither too small nor too large.

Units    bytes, alignment included
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import padded
from strata.engine.device.base import Array
from strata.engine.device.host import HostDevice, HostMirror
from strata.kernels.cuda.repack import card_form
from strata.kernels.formats import Weight


def form_bytes(w: Weight) -> int:
    """What a matrix takes more in its card form, if it has one."""
    form = card_form(w.type, w.cols)
    return 0 if form is None else padded(w.experts * w.rows * form.row_bytes(w.cols)) - padded(w.data.nbytes)


class Meter(HostDevice):
    """`weights` and `table_bytes`: what was bound; `state`: `zeros` and `mirror` together; `far_state`: `far`, in RAM.

    stacks         of the weights, those of the layers' experts · expert_sizes: of an expert's gate, up and down a layer
    head           of the weights, the output matrix
    forms          what the card forms of matrices and stacks take more · stack_forms: of the stacks alone
    """

    def __init__(self, sides: int) -> None:
        super().__init__("reference")
        self.sides = sides
        self.weights = self.stacks = self.forms = self.stack_forms = self.head = self.table_bytes = self.state = 0
        self.far_state = 0
        self.expert_sizes: list[tuple[int, int, int]] = []

    def put(self, array: npt.NDArray[Any]) -> Array:
        self.weights += padded(array.nbytes)
        return array

    def weight(self, w: Weight) -> Weight:
        self.weights += padded(w.data.nbytes)
        return w

    def output(self, w: Weight) -> Weight:
        self.head = padded(w.data.nbytes)
        return self.weight(w)

    def matrix(self, w: Weight) -> Weight:
        self.forms += form_bytes(w)
        return self.weight(w)

    def experts(self, layer: int, stacks: Sequence[Weight]) -> Sequence[Weight]:
        each = [w.data.nbytes // w.experts for w in stacks]
        self.expert_sizes.append((each[0], each[1], each[2]))
        self.stacks += sum(padded(w.data.nbytes) for w in stacks)
        self.stack_forms += sum(map(form_bytes, stacks))
        return [self.matrix(w) for w in stacks]

    def table(self, w: Weight) -> Weight:
        self.table_bytes += padded(w.data.nbytes)
        return w

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        array = np.broadcast_to(np.zeros((), dtype), shape)
        self.state += padded(array.size * array.itemsize)
        return array

    def far(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        array = np.broadcast_to(np.zeros((), dtype), shape)
        self.far_state += array.size * array.itemsize
        return array

    def fill(self, array: Array, value: float) -> None:
        """There is nothing to fill."""

    def mirror(self, shape: tuple[int, ...], value: int) -> HostMirror:
        mirror = super().mirror(shape, value)
        self.state += padded(mirror.host.nbytes)
        return mirror

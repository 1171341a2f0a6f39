"""The tape of a verify window on a card. A replay there reads its number of rows on the device, and is a few launches.

Beside the products of the delta net layers it keeps the inputs of the n-gram embedding's convolution. So a replay makes
no product: all delta net layers are done over at once (`kernels.cuda.gdn_again`), and the kept inputs are moved. A
segment without rows leaves everything as it is.

Memory   in the device's tape, valid until the next one begins
Cost     three launches, and the state of a slot once there and back; nothing but the launches where no row is done over
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.model.tape import Tape
from strata.kernels.cuda.gdn_again import Again, gdn_again
from strata.kernels.cuda.ple import ple_again

if TYPE_CHECKING:
    from strata.engine.model.ple import PleBlock
    from strata.engine.state.slots import StatePool


class CardTape(Tape):
    """Of one pass. Replays go to the other side of a slot's state."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._card = device

    def embed(self, block: PleBlock, x: Array, tokens: Array, segments: Array, state: StatePool) -> None:
        own, kernels = state.recurrent, self._card.kernels
        rows = kernels.ple_rows(block.weights, tokens, segments, own.history)
        inputs = self._card.tape.array((len(x), x[0].size))
        kernels.ple(block.weights, x, rows, segments, own.ple_conv, block.eps, inputs)
        self._ple.append((block, tokens, inputs))

    def replay(self, begin: int, n: int, segments: Any, state: StatePool) -> None:
        """As `Tape.replay`, over as many of the n rows as the segment has when it is read."""
        rows, own = slice(begin, begin + n), state.recurrent
        for embedding, tokens, inputs in self._ple:
            ple_again(embedding.weights, tokens[rows], inputs[rows], segments, own.history, own.ple_conv)
        layers = []
        for block, (p, _, b, a) in self._gdn:
            of_layer = own.gdn[block.ordinal]
            layers.append(Again(block.weights.small, p[rows], b[rows], a[rows], of_layer.conv, of_layer.state))
        gdn_again(layers, segments)

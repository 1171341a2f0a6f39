"""A tape: what the recurrences of a pass were given, so that they can run again over the first of its rows only.

    rows = replace(rows, tape=Tape(device))
    ...a pass over them; then, where the slot's state is what it was before the pass:
    tape.replay(begin, n, segments, state)

A verify window reads the known token and some drafts. When the model decides against a draft, the recurrent state must
be that of the rows before it: their inputs to delta net and n-gram embedding are here, and those see nothing of later
rows. Keys and values need no replay: what lies behind a sequence's length is written again before anybody reads it.

Memory   what the tape holds is valid until the next one begins (`Device.rewind`)
Cost     a replay is the recurrence of the rows that stay, and of products that of the n-grams; on a card card_tape.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strata.engine.device.base import Device
from strata.kernels.formats import Weight
from strata.kernels.ops import F32, I32

if TYPE_CHECKING:
    from strata.engine.model.gdn import GdnBlock
    from strata.engine.model.ple import PleBlock
    from strata.engine.pack import ModelSpec
    from strata.engine.state.slots import StatePool


class Tape:
    """Of one pass, on the device of its rows."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._gdn: list[tuple[GdnBlock, Sequence[F32]]] = []
        self._ple: list[tuple[PleBlock, I32, F32]] = []
        device.rewind()

    def project(self, block: GdnBlock, weights: Sequence[Weight], u: F32) -> Sequence[F32]:
        """The block's products, kept."""
        made = self._device.project(weights, u)
        self._gdn.append((block, made))
        return made

    def embed(self, block: PleBlock, x: F32, tokens: I32, segments: I32, state: StatePool) -> None:
        """Let the block do its work; its inputs are kept, the tokens must stay."""
        self._ple.append((block, tokens, x.copy()))
        block.again(x, tokens, segments, state)

    def replay(self, begin: int, n: int, segments: Any, state: StatePool) -> None:
        """Let one slot's recurrent state advance over n rows from row `begin` of the pass. Once for each slot.

        segments   int32 (1, 3), where kernels read it: the slot as `StatePool.located` names it, 0, n
        """
        device, rows = self._device, slice(begin, begin + n)
        device.begin()
        for embedding, tokens, x in self._ple:
            embedding.again(x[rows], tokens[rows], segments, state)
        for block, made in self._gdn:
            device.turn()
            block.again([array[rows] for array in made], segments, state)
        if len(self._gdn) % 2:
            device.turn()  # so that every pass finds the same turn
        device.rest()


def tape_bytes(spec: ModelSpec, rows: int, alignment: int) -> int:
    """Bytes of a tape of so many rows: the products of every delta net layer, the input of the n-gram embedding."""

    def padded(width: int) -> int:
        return -(-4 * rows * width // alignment) * alignment

    layer = (spec.gdn_channels, spec.gdn_inner, spec.gdn_value_heads, spec.gdn_value_heads)
    return len(spec.gdn_layers) * sum(map(padded, layer)) + (padded(spec.wide) if spec.ple else 0)

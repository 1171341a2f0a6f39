"""Delta net layers once more over the first tokens of a window: all of them in one launch.

    gdn_again([Again(w, p, b, a, conv, state), ..], segments)

Every layer's state advances over the rows of one segment, from what its products have left; the row that the state goes
to holds the bits that `gdn` over just these rows leaves. A segment without rows changes nothing.

Shapes   as `ops.Kernels.gdn`: p (n, 2*K*D + V*D), b and a (n, V); segments int32 (1, 3), read on the device, of at most
         WINDOW_ROWS rows, with a state that goes to another row than it comes from
Errors   ValueError for layers that differ in shape, or too many rows
Cost     reads and writes each state once; a launch for every LAYERS layers, some microseconds where nothing is done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.gdn import COLUMNS, HEAD_SIZES, MOST_TAPS, WINDOW_ROWS
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.ops import Gdn

LAYERS: Final = 48
"""Layers of a launch at most, as in the source."""
_THREADS: Final = 8 * COLUMNS
_LAYER: Final = np.dtype([(name, np.uint64) for name in ("p", "b", "a", "conv_w", "w_a", "w_dt", "conv", "state")])
_LAYERS_OF_LAUNCH: Final = np.dtype([("layer", _LAYER, LAYERS)])


class Again(NamedTuple):
    """A layer: its weights, its products of the window's rows, and where its state is."""

    w: Gdn
    p: DeviceArray
    b: DeviceArray
    a: DeviceArray
    conv: DeviceArray
    state: DeviceArray

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Rows, channels, heads, elements of a head, taps. Raises ValueError for what does not fit together."""
        w = self.w
        size = check(
            w_a=(w.a, "V", F32),
            w_dt=(w.dt, "V", F32),
            p=(self.p, "n channels", F32),
            w_conv=(w.conv, "channels kernel", F32),
            b=(self.b, "n V", F32),
            a=(self.a, "n V", F32),
            conv=(self.conv, "slots kept channels", F32),
            state=(self.state, "slots V D D", F32),
        )
        return size["n"], size["channels"], size["V"], size["D"], size["kernel"]

    @property
    def places(self) -> tuple[int, ...]:
        w = self.w
        return tuple(map(address, (self.p, self.b, self.a, w.conv, w.a, w.dt, self.conv, self.state)))


def gdn_again(layers: Sequence[Again], segments: DeviceArray) -> None:
    """Let the states of the layers advance over the segment's rows, to the row that it names."""
    check(segments=(segments, "1 3", I32))
    shapes = {layer.shape for layer in layers}
    if not shapes:
        return
    require(len(shapes) == 1, f"layers of one shape, got {sorted(shapes)}")
    ((n, channels, heads, d, taps),) = shapes
    key_heads = (channels - heads * d) // (2 * d)
    require(n <= WINDOW_ROWS, f"a window has at most {WINDOW_ROWS} rows, got {n}")
    require(d in HEAD_SIZES, f"D must be one of {HEAD_SIZES}, got {d}")
    require(2 <= taps <= MOST_TAPS, f"w.conv must have 2 to {MOST_TAPS} taps, got {taps}")
    for begin in range(0, len(layers), LAYERS):
        some = layers[begin : begin + LAYERS]
        table = np.zeros((), _LAYERS_OF_LAUNCH)
        for i, layer in enumerate(some):
            table["layer"][i] = layer.places
        launch(
            "gdn_again.cu", "gdn_again", (d // COLUMNS, heads, len(some)), (_THREADS,),
            table, segments, key_heads, heads, HEAD_SIZE=d, TAPS=taps, TOKENS=WINDOW_ROWS,
        )  # fmt: skip

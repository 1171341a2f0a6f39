"""The one table of GGUF tensor types: block sizes, bytes, scale groups. Everything else reads it.

Every block-quantised type is described the same way, whatever its bytes look like. A row of `cols` weights is cut
into *scale groups* of `group` values (16 or 32). The weights of group g are

    w[i] = code[i] * scale[g] + offset[g]          (offset only where `has_offset`)

with `code` an int8, `scale` and `offset` float32 that are *exact* products of the numbers in the block (a half
precision scale times a small integer; never rounded). Unpacking a block to (codes, scales, offsets) is therefore
lossless, and a product with int8 activations is exact int32 arithmetic inside a group (see `ops.py`).

code and scale of each type (d, dmin: the block's half-precision scales; s, m: its small integers):

    Q8_0             code q             scale d                Q2_0     code 2bit - 1        scale d
    Q4_0, Q5_0       code q - 8, - 16   scale d                Q4_1, Q5_1  code q            scale d, offset m (half)
    Q2_K             code q (0..3)      scale d*s, offset -dmin*m
    Q3_K             code q (-4..3)     scale d*(s - 32)       Q6_K     code q - 32          scale d*s
    Q4_K, Q5_K       code q             scale d*s, offset -dmin*m
    IQ4_NL           code table[q]      scale d                IQ4_XS   code table[q]        scale d*(s - 32)
    IQ2_XXS, IQ2_XS, IQ2_S   code +-grid (8, 25, 43)           scale d*(2s + 1)/8
    IQ3_XXS          code +-grid (4..62)  scale d*(2s + 1)/4   IQ3_S    code +-grid (1..15)  scale d*(2s + 1)
    IQ1_S, IQ1_M     code 8*grid +- 1   scale d*(2s + 1)/8     (grid -1, 0, 1; the delta of 1/8 becomes the +- 1)
    MXFP4            code 2*e2m1 (0..12)  scale 2^(e - 128)

A *card form* is another layout of a file's type, with the same codes and scales and so the same products. It is made
when a matrix comes to a card for good (cuda/repack.py), never in a file; CARD_FORMS names them. A block is

    IQ3_S_CARD   d, two bytes of 0; four bytes, s of span i (32 weights) low and of span i + 4 high; 16 bytes a span,
                 byte j with n = (code + 15) / 2 of weight j low and of weight 16 + j high
    IQ4_NL_CARD  d of four blocks; 16 bytes a block, word t with q of weights 4 t .. 4 t + 3, lowest bits first, then of
                 weights 16 + 4 t .. 19 + 4 t
    Q6_K_CARD    as in the file, and six bytes of 0, so that words begin at words

Source: the GGUF tensor types as ggml defines them; `gguf.quants` is the independent check in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TensorType:
    """One GGUF tensor type.

    `ggml_id` the number in the file, of a card form that and CARD_ONLY · `block` values per block · `block_bytes` bytes
    per block · `group` values per scale group, 0 for the float types · `has_offset` whether a group also carries an
    additive offset.
    """

    name: str
    ggml_id: int
    block: int
    block_bytes: int
    group: int
    has_offset: bool = False

    @property
    def is_float(self) -> bool:
        """F32, F16 or BF16: the product takes float32 activations."""
        return self.group == 0

    @property
    def is_card_form(self) -> bool:
        """In no file: a card's own layout of another type. A matrix begins at a multiple of 8 bytes."""
        return self.ggml_id >= CARD_ONLY

    @property
    def sums(self) -> int:
        """Activations whose sum a product needs together, for the offset of their group; 0 without offsets."""
        return self.group if self.has_offset else 0

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` values. Raises ValueError when the row is no whole number of blocks."""
        if cols % self.block:
            raise ValueError(f"a row of {cols} values is no whole number of {self.name} blocks of {self.block}")
        return cols // self.block * self.block_bytes


CARD_ONLY: Final = 1 << 16

_TYPES: Final = (
    TensorType("F32", 0, 1, 4, 0),
    TensorType("F16", 1, 1, 2, 0),
    TensorType("BF16", 30, 1, 2, 0),
    TensorType("Q4_0", 2, 32, 18, 32),
    TensorType("Q4_1", 3, 32, 20, 32, has_offset=True),
    TensorType("Q5_0", 6, 32, 22, 32),
    TensorType("Q5_1", 7, 32, 24, 32, has_offset=True),
    TensorType("Q8_0", 8, 32, 34, 32),
    TensorType("Q2_K", 10, 256, 84, 16, has_offset=True),
    TensorType("Q3_K", 11, 256, 110, 16),
    TensorType("Q4_K", 12, 256, 144, 32, has_offset=True),
    TensorType("Q5_K", 13, 256, 176, 32, has_offset=True),
    TensorType("Q6_K", 14, 256, 210, 16),
    TensorType("IQ2_XXS", 16, 256, 66, 32),
    TensorType("IQ2_XS", 17, 256, 74, 16),
    TensorType("IQ3_XXS", 18, 256, 98, 32),
    TensorType("IQ1_S", 19, 256, 50, 32),
    TensorType("IQ4_NL", 20, 32, 18, 32),
    TensorType("IQ3_S", 21, 256, 110, 32),
    TensorType("IQ2_S", 22, 256, 82, 16),
    TensorType("IQ4_XS", 23, 256, 136, 32),
    TensorType("IQ1_M", 29, 256, 56, 16),
    TensorType("MXFP4", 39, 32, 17, 32),
    TensorType("Q2_0", 42, 64, 18, 32),
)

_CARD_TYPES: Final = (
    TensorType("IQ3_S_CARD", CARD_ONLY + 21, 256, 136, 32),
    TensorType("IQ4_NL_CARD", CARD_ONLY + 20, 128, 72, 32),
    TensorType("Q6_K_CARD", CARD_ONLY + 14, 256, 216, 16),
)

BY_ID: Final = MappingProxyType({t.ggml_id: t for t in _TYPES})
"""Types of files."""
BY_NAME: Final = MappingProxyType({t.name: t for t in (*_TYPES, *_CARD_TYPES)})
CARD_FORMS: Final = MappingProxyType({BY_ID[t.ggml_id - CARD_ONLY].name: t for t in _CARD_TYPES})
"""The card form of a file's type, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix, or a stack of expert matrices, exactly as the file stores it.

    shape   (rows, cols), or (experts, rows, cols); a product maps `cols` inputs to `rows` outputs
    data    uint8, C-contiguous, (rows, row_bytes) or (experts, rows, row_bytes); usually a view of a mapped file,
            so rows start at any byte address
    """

    type: TensorType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise ValueError(f"a weight has 2 or 3 dimensions, got {self.shape}")
        want = (*self.shape[:-1], self.type.row_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != want or not self.data.flags.c_contiguous:
            raise ValueError(
                f"{self.type.name} {self.shape} needs uint8 {want}, got {self.data.dtype} {self.data.shape}"
            )

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def experts(self) -> int:
        """Matrices in the stack; 1 for a plain matrix."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def expert(self, e: int) -> Weight:
        """Matrix `e` of the stack, without a copy."""
        if len(self.shape) != 3:
            raise ValueError("not a stack of experts")
        return Weight(self.type, self.shape[1:], self.data[e])

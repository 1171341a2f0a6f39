"""The contract of every operation: shapes, dtypes, order of summation, errors. No arithmetic here.

A *backend* is a module with these functions: `kernels.reference` (NumPy, the truth), `kernels.cpu` (numba), later
`kernels.cuda`. The model is written against `Kernels` and does not know which it has.

Rows       n rows of one forward pass; row i is token `tokens[i]` at `positions[i]` of slot `slots[i]`.
Segments   int32 (s, 3): slot, begin, end. Rows [begin, end) are consecutive tokens of one slot; segments cover all
           rows in order and no slot has two of them.
Arrays     float32, C-contiguous, unless said. State arrays are updated in place; all other arguments are only read.
Errors     ValueError naming the argument, the wanted and the given shape, raised before anything is written.

One arithmetic
--------------
`reference` computes the formulas; `cpu` and every later device compute *these* steps and give the same bits for a row
whatever rows are beside it. `fma` is a single-rounding fused multiply-add; every other operation rounds once to
float32; division and square root are correctly rounded; no reassociation, no flush of subnormals.

lanes(v)   The sum of v[0..N): LANES chains, chain j adds v[j], v[j + LANES], ... in this order starting from 0, then
           the fold `for s in (64, 32, 16, 8, 4, 2, 1): p[j] = p[j] + p[j + s]`. A sum of products uses fma in the
           chains. Chains without elements are 0.
dot4(a, b) The sum of a[i] * b[i]: four chains (i mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3). Scores
           are such sums: a thread of a card holds a whole one, so a tile of a prompt needs no exchange of lanes.
quantize   Blocks of ACT_BLOCK = 32 inputs: amax = max |x|; amax < 1e-30: d = 0 and all q = 0; otherwise
           d = amax / 127, inv = 127 / amax, q = round_half_even(x * inv) as int8.
product    Quantised weight row times activation row (formats.py: code, scale, offset per group of `group`):
               acc = 0
               for each group g along the row, in order; b the activation block that holds g:
                   acc = fma(float(sum_i code[i] * q[i]) * scale[g], d[b], acc)           # the int32 sum is exact
                   if the type has offsets: acc = fma(float(sum_i q[i]) * offset[g], d[b], acc)
           The weight's factor comes first: a scale has at most 18 significant bits, so a tensor-core tile whose int32
           sums start at the bits of M = 12582912.0 gets float(sum) * scale as one fma(M + sum, scale, -M * scale).
           Float weight row: lanes(w[i] * x[i]) with w converted to float32 exactly.
exp        n = round_half_even(x * 1.44269504), r = fma(-n, 0.693145751953125, x), r = fma(-n, 1.42860677e-6, r),
           p = EXP_POLY[0]; for c in EXP_POLY[1:]: p = fma(p, r, c); y = fma(p, r * r, r) + 1; times 2^n by exponent
           bits. x < -87.3 gives 0; x > 88.3 is taken as 88.3 (no operation of the model gets there).
sigmoid    1 / (1 + exp(-x)).   silu: x / (1 + exp(-x)).
softplus   max(x, 0) + log1p(exp(-|x|)); log1p(y) = 2 * atanh(z), z = y / (2 + y), s = z * z, p = LOG1P_POLY[0];
           for c in LOG1P_POLY[1:]: p = fma(p, s, c); (2 * z) * p.
rms        r = 1 / sqrt(lanes(x * x) / N + eps); y = (x * r) * w.
cache      Keys and values in pages are float32, or rounded to float16, or blocks of 32 codes with a float16 scale d:
           int8: d = amax / 127, codes -127..127; q4_0: d = m / -8 with m the first element of largest magnitude, codes
           -8..7. d is rounded to float16 with magnitude at most 65504; code = clip(round_half_even(x / d)), 0 where
           d = 0. Attention reads float32(code) * float32(d), which is exact; formats: kv.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.kernels.formats import TensorType, Weight

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

LANES: Final = 128
ACT_BLOCK: Final = 32
PAGE: Final = 64
"""Tokens of a page of keys and values."""
ATTENTION_PART: Final = 256
"""Selected tokens of one part of an attention sum."""
GDN_GROUPS: Final = 8
"""Groups of state rows whose sums are folded as a tree in the delta rule."""
MAX_TOP_K: Final = 64
DOWN_PART: Final = 2560
"""Inputs of a part of the sum of `down` in `Kernels.hyper_mix` at most, where a stream has no more."""
_WHOLE: Final = 256
"""Inputs of the longest block of a type: no part ends inside of one."""

EXP_POLY: Final = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG1P_POLY: Final = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """cos and sin of the rotation angles, float32 (positions, rotated dims / 2), computed in float64 once at start.

    Half-split form: x'_j = x_j cos - x_{j+h} sin, x'_{j+h} = x_{j+h} cos + x_j sin with h = rotated dims / 2;
    each as fma(x_j, cos, -(x_{j+h} * sin)) and fma(x_{j+h}, cos, x_j * sin).
    """

    cos: F32
    sin: F32


@dataclass(frozen=True, slots=True, eq=False)
class Hyper:
    """Weights of one hyper-connection module. norm (C, H); down (R, C*H); up (C*H, R); inject (C, C*H) or None."""

    norm: F32
    down: Weight
    up: Weight
    inject: Weight | None


def streams_of_a_part(kind: TensorType, streams: int, width: int) -> int:
    """Streams of a part of the sum of `down` in `Kernels.hyper_mix`, for weights of this type; the last part has the
    rest. All of them where a part would not be whole blocks of any type."""
    most = max(DOWN_PART // width, 1)
    return streams if kind.is_float or most * width % _WHOLE else min(most, streams)


@dataclass(frozen=True, slots=True, eq=False)
class FarPages:
    """Of a layer some of whose pages lie in RAM that a card reads: what a page table calls ~p is page p here.

    k, v, raw          as of `AttentionPages`
    numbers            int32 (slots, pages of a slot): tables of the pages of `block`, which are all on the card
    staged_k, staged_v  pages of one slot, in order: where a prompt reads keys and values from
    order              int32 (slots, pages of a slot): 0, 1, 2 .. of each
    """

    k: F32
    v: F32
    raw: F32
    numbers: I32
    staged_k: F32
    staged_v: F32
    order: I32


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPages:
    """Keys and values of one attention layer, pages of PAGE tokens; one page table per slot serves all layers.

    k, v    (pages, PAGE, kv_heads, head_dim), or rows of another format (kv.py); k is normed and rotated
    raw     (pages, PAGE, index_dim): indexer keys as projected
    block   (pages, PAGE / r, index_dim): keys of complete blocks of r tokens (pooled, normed, rotated);
            shape (pages, 0, index_dim) when the layer is dense (r = 0)
    far     pages in RAM, on a card; None: all lie here
    """

    k: F32
    v: F32
    raw: F32
    block: F32
    far: FarPages | None = None

    @property
    def r(self) -> int:
        """Tokens of an indexer block, 0 = the layer is dense."""
        return PAGE // self.block.shape[1] if self.block.shape[1] else 0


@dataclass(frozen=True, slots=True, eq=False)
class Norms:
    """Norm factors of an attention layer: q, k (head_dim,); index_q, index_k (index_dim,)."""

    q: F32
    k: F32
    index_q: F32
    index_k: F32


@dataclass(frozen=True, slots=True, eq=False)
class Gdn:
    """Small weights of a gated delta net layer.

    conv (2*K*D + V*D, kernel) · a (V,) = -exp(A_log) · dt (V,) · norm (D,). K key heads, V value heads, head size D;
    value head j uses key head j mod K. D % 32 == 0.
    """

    conv: F32
    a: F32
    dt: F32
    norm: F32


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    """Weights of one mixture-of-experts block. router (E, H); gate, up (E, I, H); down (E, H, I); the shared
    expert likewise without E; shared_router (1, H) float32."""

    router: Weight
    gate: Weight
    up: Weight
    down: Weight
    shared_router: Weight
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class Ple:
    """Weights of the n-gram embedding. table (rows, width); key (C*H, E); value (H, E); norm_* (C, H);
    conv (C*H, kernel), dilation = order N. multipliers (N,), sizes and offsets (heads,) with heads = (N - 1) * per
    order: all uint64."""

    table: Weight
    key: Weight
    value: Weight
    norm_key: F32
    norm_query: F32
    norm_conv: F32
    conv: F32
    multipliers: U64
    sizes: U64
    offsets: U64
    eos: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row is sampled. temperature <= 0: the argmax of the raw logits, everything else unused."""

    temperature: float = 0.0
    top_k: int = 20
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    seed: int = 0


class Kernels(Protocol):
    """The operations. Every backend module has exactly these names."""

    def set_threads(self, n: int) -> None:
        """Bound the threads of all operations. `reference` ignores it."""

    def dequantize(self, w: Weight, rows: I64) -> F32:
        """Rows of a matrix as float32: code * scale + offset (one fma). rows int64 (n,) -> (n, cols)."""

    def linear(self, weights: Sequence[Weight], x: F32) -> list[F32]:
        """Several matrices with one input: x (n, cols) -> [(n, rows_i)]. Inputs are quantised once (`quantize`,
        `product`); float weights take x as it is. The reference dequantises and multiplies in float32."""

    def rms_norm(self, x: F32, w: F32, eps: float) -> F32:
        """`rms` over the last axis: x (..., N), w (N,) or (G, N) for x (n, G, N)."""

    def hyper_mix(self, x: F32, hc: Hyper, eps: float) -> tuple[F32, F32 | None]:
        """Residual streams x (n, C, H) -> u (n, H) and beta (n, C), None without inject.

        norm = rms(x) per stream; a = silu(down(norm) * (1/C)); G = up(a);
        down of a quantised type: the row's inputs in parts of `streams_of_a_part` whole streams, each a `product` from
        0; ((p0 + p1) + p2) + ..
        u = (sum_c sigmoid(G[c]) * norm[c]) * (1/C), c ascending, first a product, then fma;
        beta = 2 * sigmoid(inject(norm) * (1/C)).
        """

    def hyper_add(self, x: F32, beta: F32, y: F32) -> None:
        """x (n, C, H) in place: x[c] = fma(beta[c], y, x[c]). beta (n, C), y (n, H)."""

    def gdn(self, w: Gdn, p: F32, z: F32, b: F32, a: F32, segments: I32, conv: F32, state: F32, eps: float) -> F32:
        """The gated delta net between its projections. p (n, 2*K*D + V*D), z (n, V*D), b and a (n, V) -> (n, V*D).

        conv (slots, kernel - 1, channels): the last inputs, oldest first; state (slots, V, D_k, D_v); both in place.
        c = silu(sum_j w[:, j] * p[t - 3 + j]), j ascending, first a product, then fma.
        q = (q * r) * (1/sqrt(D)), k = k * r, r = 1 / sqrt(lanes(x * x) + 1e-6) per head.
        decay = exp(a_w * softplus(a + dt)); beta = sigmoid(b).
        Per value head and column, a sum over the D_k state rows is: GDN_GROUPS groups of D/8 consecutive rows; in a
        group four chains (row mod 4) of fma in ascending order from 0, (c0 + c1) + (c2 + c3); the groups as
        ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)).
        S = S * decay; e = beta * (v - sum(S * k)); S = fma(k, e, S); o = sum(S * q).
        y = (rms(o) with norm) * sigmoid(z), `rms` per head.
        """

    def qsa_store(
        self,
        pages: AttentionPages,
        tables: I32,
        slots: I32,
        positions: I32,
        k: F32,
        v: F32,
        index_k: F32,
        norms: Norms,
        rope: Rope,
        eps: float,
    ) -> None:
        """Write keys and values of n rows; complete the index blocks that end at one of them.

        k, v (n, kv_heads, head_dim) as projected; index_k (n, index_dim). tables (slots, pages of a slot): the page
        that holds positions [64 j, 64 j + 64). k = rope(rms(k)). A block ends at position p when (p + 1) % r == 0:
        its key is rope(rms(mean of its r raw keys), position of its first token); the mean is the sum in ascending
        order times 1/r.
        """

    def qsa_attend(
        self,
        pages: AttentionPages,
        tables: I32,
        slots: I32,
        positions: I32,
        q_gate: F32,
        index_q: F32,
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> F32:
        """Attention of n rows over what `qsa_store` wrote. q_gate (n, heads, 2, head_dim): query, then gate;
        index_q (n, index_heads, index_dim); -> (n, heads * head_dim).

        q = rope(rms(q)), index_q = rope(rms(index_q)). Visible: positions 0..p. Complete blocks m = (p + 1) // r;
        score_j = sum over heads, ascending, of max(0, dot4(index_q, block_j)). Kept: the budget // r best blocks
        (equal scores: the lower index) and the tail r*m..p. Dense layers (r = 0) and m <= budget // r keep all.
        The kept tokens, ascending, in parts of ATTENTION_PART: s = dot4(q, k) * (1/sqrt(head_dim)),
        m_p = max s, e = exp(s - m_p), l_p = lanes(e), o_p = fma chain of e * v in token order; parts are joined in
        order with c_p = exp(m_p - max m): l = fma(c_p, l_p, l), o = fma(c_p, o_p, o), both from 0;
        out = (o / l) * sigmoid(gate). Query head h uses kv head h // (heads / kv_heads).
        """

    def route(self, logits: F32, used: int) -> tuple[I32, F32]:
        """logits (n, E) -> experts int32 (n, used) by falling logit (equal: the lower index) and their weights:
        e_i = exp(l_i - l_0), divided by their sum in rank order."""

    def moe(self, w: Moe, x: F32, used: int) -> F32:
        """x (n, H) -> (n, H). Router product, `route`, then per picked expert down(silu(gate x) * (up x)); outputs
        joined in rank order acc = fma(weight, out, acc) from 0; then fma(sigmoid(shared_router x), shared, acc)."""

    def ple_rows(self, w: Ple, tokens: I32, segments: I32, history: I32) -> I64:
        """Table rows of n tokens: int64 (n, heads). history (slots, N - 1) in place: the ids before the next token,
        oldest first, as the hash sees them: w.eos where the sequence had not begun. Going back from a token, once an
        eos is met that position and all before it read as eos."""

    def ple(self, w: Ple, x: F32, rows: I64, segments: I32, conv: F32, eps: float) -> None:
        """x (n, C, H) in place: x = x + (p + d). conv (slots, (kernel - 1) * N, C*H) in place, oldest first.

        e = table rows, concatenated; key = rms(key(e)) per stream, query = rms(x); s = lanes(key * query) *
        (1/sqrt(H)); gamma = sigmoid(sign(s) * sqrt(max(|s|, 1e-6))); p = gamma * value(e); f = rms(p);
        d = silu(sum_j conv_w[:, j] * f[t - (kernel - 1 - j) * N]), j ascending, first a product, then fma.
        """

    def sample(self, logits: F32, recent: I32, how: Sampling, position: int) -> int:
        """One token id from logits (V,): a pure function of the arguments. `recent`: the ids the penalties look at.

        Order: penalties (repeat: l / p where l > 0, l * p elsewhere, once per distinct id; then l - count * freq -
        present), top-k (1..64, equal: the lower id), temperature, softmax, top-p (the shortest prefix by falling
        probability that reaches it), min-p (below min_p * the best), draw. All in float64 over the at most 64
        candidates. The draw: Philox-4x32-10, key = seed (low, high word), counter = (position low, high, 0, 0),
        u = (first word + 0.5) * 2^-32; the first candidate whose cumulated probability exceeds u * total.
        `position` is the position that the sampled token will have.
        """

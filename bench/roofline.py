"""What the card could reach: tokens per second of the targets P1 to P6, beside what was measured.

    python -m strata.bench.roofline --pack model.gguf --ceilings profile.json [--measured engine.json ...] [--json FILE]

From the header of a pack and the ceilings that kernel_profile_cuda measured; the "peer" of a limit is what a tool has
measured for that target, the "ratio" how many times as much the limit is.

Decode    bytes of all weights that a window reads (of the experts as many as its rows pick, of tables a row), of the
          states of its sequences, read and written, and of keys, values and index blocks that its rows see, at the rate
          of the card's memory
Prompts   multiply-adds of the products at the rate of matrix steps with their groups, of float products, attention,
          scores of blocks and the delta net at that of float32; or the bytes of all weights, where these take longer
Left out  activations, norms, routing, gaps: what is left of the limit is theirs and the kernels'

Errors    those of opening a pack; exit code 2 where the ceilings lack one
Cost      under a second, no card
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from strata.bench.ceilings import Ceilings, Work, from_records
from strata.bench.kernel_limits import DELTA_MACS, FLOAT, Limits, Pass, different
from strata.bench.report import Record, Report, finish, pack_facts
from strata.engine.pack import Pack, PackError, Tensor, open_pack
from strata.engine.pack.spec import NGRAM_TABLE, TOKEN_EMBD
from strata.kernels.kv import KV

OUTPUT: Final = re.compile(r"^output")
"""The head and its mixer: of a prompt, for its last row only."""
BLOCK: Final = re.compile(r"^blk\.(\d+)\.")
VECTORS: Final = ("ssm_conv1d", "ple_conv1d")
"""Tensors with two dimensions that are no matrices."""


class Aim(NamedTuple):
    """A target: decode of `rows` sequences behind `depth` tokens, or a prompt of so many rows. measured: the work of
    its record, "" where its name is enough."""

    target: str
    work: str
    rows: int
    depth: int
    decode: bool
    measured: str = ""


AIMS: Final = (
    Aim("P1", "decode, one stream", 1, 64, True, "tg 128"),
    Aim("P2", "decode, one stream at 32,000", 1, 32_064, True, "tg 128 @ 32000"),
    Aim("P3", "decode, eight streams", 8, 64, True),
    Aim("P4", "prompt of 8,192", 8192, 0, False, "pp 8192"),
    Aim("P5", "prompt of 2,048", 2048, 0, False, "pp 2048"),
    Aim("P6", "prompt of 32,768", 32_768, 0, False, "pp 32768"),
    Aim("P6", "prompt of 2,048 at 131,072", 2048, 131_072, False, "pp 2048 @ 131072"),
)


def trunk(pack: Pack) -> Iterator[tuple[str, Tensor]]:
    """Tensors that every pass reads as a whole, experts apart: no tables of which it reads rows, no draft layer."""
    for name in pack:
        block = BLOCK.match(name)
        if name not in (TOKEN_EMBD, NGRAM_TABLE) and not (block and int(block[1]) >= pack.spec.layers):
            yield name, pack[name]


def weight_bytes(pack: Pack, rows: int) -> float:
    """That a pass of so many rows reads."""
    s, total = pack.spec, 0.0
    share = different(s.experts, s.experts_used, rows) / s.experts
    for _, tensor in trunk(pack):
        total += tensor.data.nbytes * (share if len(tensor.shape) > 2 else 1.0)
    total += rows * pack[TOKEN_EMBD].data.nbytes / s.vocab
    if s.ple is not None:
        total += rows * s.ple.heads * pack[NGRAM_TABLE].data.nbytes / s.ple.table_rows
    return total


def sequence_work(pack: Pack, limits: Limits) -> Work:
    """Attention and the delta net of all layers."""
    s, rows = pack.spec, limits.rows
    numbers = s.gdn_value_heads * s.gdn_head_dim**2 * len(s.gdn_layers)
    out = limits.ceilings.float32(float(DELTA_MACS * len(rows) * numbers))
    out = out.plus(Work(2.0 * FLOAT * numbers * rows.sequences))
    vector = sum(form.row(s.head_dim) * form.dtype.itemsize * s.kv_heads for form in KV[limits.kv])
    for layer in s.attention_layers:
        seen = limits.seen(s.ratios[layer])
        macs = 2 * seen.kept * s.heads * s.head_dim + seen.scored * s.index_heads * s.index_dim
        out = out.plus(limits.ceilings.float32(macs))
        out = out.plus(Work(seen.tokens * vector + seen.blocks * s.index_dim * FLOAT))
    return out


def products(pack: Pack, rows: int, ceilings: Ceilings) -> Work:
    """Multiply-adds of a prompt's products."""
    s, out = pack.spec, Work()
    for name, tensor in trunk(pack):
        if len(tensor.shape) < 2 or any(vector in name for vector in VECTORS):
            continue
        values = float(np.prod(tensor.shape, dtype=np.float64))
        each = values * s.experts_used / s.experts if len(tensor.shape) > 2 else values
        out = out.plus(ceilings.product(tensor.type, each * (1 if OUTPUT.match(name) else rows)))
    return out


def rate(pack: Pack, ceilings: Ceilings, aim: Aim, kv: str = "fp32") -> tuple[float, Work]:
    """Tokens per second, and the work of the window or the prompt."""
    rows = Pass.window(aim.rows, aim.depth) if aim.decode else Pass.prompt(aim.rows, aim.depth)
    work = sequence_work(pack, Limits.of(pack, ceilings, rows, kv)).plus(Work(weight_bytes(pack, aim.rows)))
    if not aim.decode:
        work = work.plus(products(pack, aim.rows, ceilings))
    us = work.n_bytes / ceilings.gb_s / 1e3 if aim.decode else ceilings.us(work)
    return aim.rows / us * 1e6, work


def records(pack: Pack, ceilings: Ceilings, kv: str = "fp32", measured: Sequence[Record] = ()) -> list[Record]:
    """One a target, with what was measured for it."""
    out = []
    for aim in AIMS:
        found, work = rate(pack, ceilings, aim, kv)
        what = f"{work.n_bytes / 1e9:.2f} GB" if aim.decode else f"{work.macs / 1e12:,.1f} TMAC"
        limit = Record.of(f"limit of {aim.work}: {what}", "tok/s", [found], aim.target)
        for r in measured:
            if r.target == aim.target and aim.measured in ("", r.work):
                limit.peer = {"name": "measured", "median": r.median, "min": r.min, "max": r.max, "runs": r.runs}
        out.append(limit)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--ceilings", type=Path, required=True, help="what kernel_profile_cuda wrote")
    parser.add_argument(
        "--measured", type=Path, nargs="*", default=[], help="what was measured: results of other tools"
    )
    parser.add_argument("--kv", choices=tuple(KV), default="fp32", help="format of keys and values (fp32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console(width=140)
    try:
        measured, *others = (_report(path) for path in (args.ceilings, *args.measured))
        pack, ceilings = open_pack(args.pack), from_records(measured.records)
    except (KeyError, OSError, PackError, msgspec.DecodeError) as error:
        console.print(f"{args.ceilings}: {error}" if isinstance(error, KeyError) else str(error), markup=False)
        return 2
    flags: dict[str, Any] = {"kv": args.kv, "ceilings": args.ceilings.name, "memory_gb_s": round(ceilings.gb_s)}
    flags |= {f"tmac_s_groups_{group}": round(value) for group, value in ceilings.steps.items()}
    flags["tmac_s_float32"] = round(ceilings.floats, 1)
    flags["measured"] = [path.name for path in args.measured]
    found = records(pack, ceilings, args.kv, [record for other in others for record in other.records])
    return finish(Report(tool="roofline", records=found, flags=flags, pack=pack_facts(args.pack)), args.json, console)


def _report(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


if __name__ == "__main__":
    sys.exit(main())

"""Sources beside the products with the constants they are compiled with: what a check without a card compiles.

operations(arch)   (source, constants) for the geometries that the engine runs: the model's, and those of the test packs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from strata.kernels.cuda.chains import router_plan
from strata.kernels.cuda.compile import Constants
from strata.kernels.cuda.gdn import BULK_ARCH, HEAD_SIZES, WINDOW_ROWS
from strata.kernels.cuda.hyper import rows_of_a_team, teams_of_a_block
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.cuda.qsa import (
    FORMATS,
    HEADS_OF_A_THREAD,
    HEADS_OF_WARP,
    KEY_WARPS,
    TILE_BLOCKS,
    TILE_KEYS,
    key_stages,
)
from strata.kernels.formats import BY_NAME
from strata.kernels.kv import KV
from strata.kernels.ops import LANES

_PLAIN: Final = (
    "norm", "embed", "sample", "window", "draft", "round", "qsa_score", "qsa_select", "fingerprint", "trace_clocks",
)  # fmt: skip
_GROUPS: Final = tuple((256, heads) for heads in HEADS_OF_A_THREAD[1:]) + ((128, 12), (192, 1))


def operations(arch: int = 90) -> Iterator[tuple[str, Constants]]:
    """Every source once for each set of constants that cards of sm_<arch> use."""
    for name in _PLAIN:
        yield f"{name}.cu", {}
    for width in (256, 2560):
        yield "ple.cu", {"WIDTH": width, "TAPS": 4}
    for per in (2, 20):
        yield "hyper.cu", {"PER_THREAD": per, "STREAMS": 4}
    for order, sums in (("NATIVE", 0), ("NATIVE", 16), ("EVEN_ODD", 0)):
        yield "hyper.cu", {"PER_THREAD": 20, "STREAMS": 4, "INPUT_ORDER": order, "SUMS": sums}
    yield "hyper.cu", {"STREAMS": 4, "FACTORS": 1}
    for order, sums in (("NATIVE", 16), ("EIGHT", 0)):
        rows: Constants = {"STREAMS": 4, "INPUT_ORDER": order, "SUMS": sums}
        for injects in (0, 1):
            yield "hyper_rows.cu", rows | {"PER_THREAD": 20, "INJECTS": injects, "TEAMS": 0, "ROWS": rows_of_a_team(0)}
        for width in (256, 2560):
            teams, _ = teams_of_a_block(CARDS[arch], 8192, 4, width, injects=True)
            of_team: Constants = {"TEAMS": teams, "ROWS": rows_of_a_team(teams)}
            yield "hyper_rows.cu", rows | {"PER_THREAD": width // LANES, "INJECTS": 1} | of_team
    for kind, spans in (("Q8_0", 10), ("Q8_0", 2), ("Q5_1", 10), ("IQ4_NL", 24)):
        up: Constants = {"TYPE": kind, "SPANS": spans, "STREAMS": 4}
        for fresh, eights, at_once in ((1, 1, 1), (0, 1, 5), (0, 2, 5)):
            yield "hyper_window.cu", up | {"FRESH": fresh, "EIGHTS": eights, "AT_ONCE": at_once}
    for kind in ("Q6_K", "Q6_K_CARD", "Q8_0", "Q5_K", "IQ4_XS"):
        down: Constants = {"TYPE": kind, "COLS": 10240, "ROW_PARTS": 4, "WORKERS": 10}
        for of_block, columns, summers in ((4, 1, 1), (4, 2, 1), (4, 8, 4), (3, 8, 3), (3, 8, 6)):
            yield "hyper_down.cu", down | {"ROWS": of_block, "COLUMNS": columns, "SUMMERS": summers}
        for parts, per in ((4, 20), (1, 2)):
            yield "hyper_down_row.cu", {"TYPE": kind, "ROWS": 3, "STREAMS": 4, "ROW_PARTS": parts, "PER_THREAD": per}
    for per in (1, 16):
        yield "route.cu", {"PER_LANE": per}
        for n in (1, 2, 8):
            yield "route_window.cu", router_plan(513, n).constants(BY_NAME["F32"], 2560) | {"PER_LANE": per}
    for d in HEAD_SIZES:
        for moves in (0, 1):
            yield "gdn.cu", {"HEAD_SIZE": d, "TAPS": 4, "MOVES": moves}
        yield "gdn_inputs.cu", {"HEAD_SIZE": d, "TAPS": 4}
        for heads in (1, 2, 3):
            yield "gdn_scan.cu", {"HEAD_SIZE": d, "TAPS": 4, "HEADS": heads}
        yield "gdn_again.cu", {"HEAD_SIZE": d, "TAPS": 4, "TOKENS": WINDOW_ROWS}
        for tokens in (1, 16):
            window: Constants = {"HEAD_SIZE": d, "TAPS": 4, "TOKENS": tokens}
            yield "gdn_window.cu", window
            for columns in (64, 128) if d == 128 else (64,) if d == 64 else ():
                for bulk in (0, 1) if arch >= BULK_ARCH else (0,):
                    slots: Constants = window | {"COLUMNS": columns, "BULK": bulk}
                    gates: Constants = {"GATES": 1, "TYPE": "F32", "STEPS": 20}
                    yield "gdn_slots.cu", slots | {"IN_REGISTERS": 0}
                    yield "gdn_slots.cu", slots | gates | {"IN_REGISTERS": 0}
                    yield "gdn_slots.cu", slots | gates | {"IN_REGISTERS": 1}
    yield "qsa_stage.cu", {}
    yield "qsa_score_tile.cu", {"TILE_KEYS": TILE_KEYS, "BLOCKS": TILE_BLOCKS}
    for keys, values in KV.values():
        formats: Constants = {"KEYS": FORMATS[keys.name], "VALUES": FORMATS[values.name]}
        yield "qsa_prepare.cu", formats
        for of_warp in (1, HEADS_OF_WARP):
            for prepares in (0, 1):
                few: Constants = {"HEADS_OF_WARP": of_warp, "PREPARES": prepares}
                yield "qsa_window.cu", formats | few
                if of_warp == 1:
                    yield "qsa_window.cu", formats | few | {"KEY_WARPS": KEY_WARPS}
        if keys.name in ("fp32", "int8"):
            yield "qsa_prepare.cu", formats | {"FAR": 1}
            for prepares in (0, 1):
                far: Constants = {"HEADS_OF_WARP": 1, "PREPARES": prepares, "KEY_WARPS": KEY_WARPS, "FAR": 1}
                yield "qsa_window.cu", formats | far
        for d, heads in ((256, 12), (64, 2), *_GROUPS * (keys.name == "fp32")):
            group: Constants = {"HEAD_SIZE": d, "HEADS": heads}
            yield "qsa_prompt_keys.cu", {"KEYS": formats["KEYS"], "STAGES": key_stages(CARDS[arch])} | group
            yield "qsa_prompt_values.cu", {"VALUES": formats["VALUES"]} | group

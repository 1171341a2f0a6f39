"""Routers whose picks follow a power law, as those of trained models about do: some experts are picked at every third
token, most at hardly any.

    python -m strata.bench.skew_router PACK --exponent 1.2      # rewrites the routers of a pack of `strata-bench synth`

The experts of a layer are ranked at random, and the row of rank r gets a length by which it is picked as often as
r ** -exponent says, at MOST of the tokens at most: the row's logit is normal with this standard deviation, and it is
picked when that passes what a `used`-th of all does. 0 makes all rows alike again. Rows keep their directions, so the
same pack can be rewritten again and again. Shards are no packs of synth and are refused, as all other files are.

Cost     a layer's router is some megabytes; 48 of them a second or two
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.pack import PackError
from strata.engine.pack.gguf import GgufFile, TensorInfo, read_gguf

ROUTER: Final = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
SYNTHETIC: Final = "synthetic"
"""general.name of what `strata-bench synth` writes."""
MOST: Final = 0.35
"""Of the tokens, that an expert is picked at: a router without a bias prefers nothing at more than a half."""
EXPONENT: Final = 1.2
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def frequencies(experts: int, used: int, exponent: float) -> F64:
    """How often each rank is picked, of all tokens; they sum to `used`."""
    law = np.arange(1, experts + 1) ** -exponent
    low, high = 0.0, used * experts**exponent
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(MOST, middle * law).sum() < used else (low, middle)
    return np.minimum(MOST, high * law)


def lengths(experts: int, used: int, exponent: float) -> F64:
    """Standard deviations of the logits of each rank; 1 where all are alike. Raises ValueError for what no router can
    be: more picks than MOST allows."""
    if not 0 <= exponent <= 4 or used > MOST * experts:
        raise ValueError(f"an exponent from 0 to 4, and at most {MOST:.0%} of the experts for a token")
    normal = NormalDist()
    passed = normal.inv_cdf(1 - used / experts)
    return np.array([passed / normal.inv_cdf(1 - p) for p in frequencies(experts, used, exponent)])


def skewed(rows: F32, used: int, exponent: float, seed: int, layer: int) -> F32:
    """A router (experts, hidden) with the same directions and other lengths."""
    experts, hidden = rows.shape
    ranks = np.random.default_rng([seed, layer]).permutation(experts)
    wanted = lengths(experts, used, exponent)[ranks] / np.sqrt((rows.astype(np.float64) ** 2).mean(1) * hidden)
    return (rows * wanted[:, None]).astype(np.float32)


def routers(file: GgufFile) -> dict[int, TensorInfo]:
    """The routers of a pack that synth has written, by layer. Raises PackError for all other files."""
    if file.metadata.get("general.name") != SYNTHETIC:
        raise PackError(file.path, "general.name", "is no pack of `strata-bench synth`; its routers stay")
    found = {int(m[1]): info for name, info in file.tensors.items() if (m := ROUTER.fullmatch(name))}
    for info in found.values():
        if info.type.name != "F32":
            raise PackError(file.path, info.name, f"is {info.type.name}; synth writes F32")
    if not found:
        raise PackError(file.path, "", "has no routers")
    return found


def rewrite(path: Path, exponent: float, seed: int) -> int:
    """Change the routers of a pack in place; how many there are. Raises PackError, ValueError before anything is
    written, OSError."""
    file = read_gguf(path)
    found = routers(file)
    architecture = file.metadata.get("general.architecture")
    used = file.metadata.get(f"{architecture}.expert_used_count")
    if not isinstance(used, int):
        raise PackError(path, "expert_used_count", "is not there")
    made = {}
    for layer, info in found.items():
        data = file.data[info.offset : info.offset + info.n_bytes]
        made[info.offset] = skewed(data.view(np.float32).reshape(info.shape), used, exponent, seed, layer)
    with path.open("r+b") as target:
        for offset, rows in made.items():
            target.seek(offset)
            target.write(rows.tobytes())
    return len(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="a file of `strata-bench synth`")
    parser.add_argument("--exponent", type=float, default=EXPONENT, help=f"of the law ({EXPONENT}); 0: all alike")
    parser.add_argument("--seed", type=int, default=1, help="of the ranks")
    args = parser.parse_args()
    try:
        n = rewrite(args.pack, args.exponent, args.seed)
    except (PackError, ValueError, OSError) as error:
        print(f"skew_router: {error}", file=sys.stderr)
        return 1
    print(f"{args.pack}: {n} routers by rank ** -{args.exponent}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A checkpoint that fits through a narrow door: bfloat16 weights in shards under 16 MiB, and a page of JSON.

Files     weights-0.bin, weights-1.bin, ...: all weights one after the other in the order of `Geometry.shapes` and
          `draft_shapes`, bfloat16 · state.json: geometry and what training has to know to go on
Rounding  a weight comes back as its nearest bfloat16: relative error up to 2^-8
Errors    ValueError for shards that do not hold the geometry's weights
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from strata.bench.demo_pack.config import Geometry

SHARD_BYTES: Final = 15 << 20


@dataclass
class Checkpoint:
    """weights: float32 by name, as training keeps them · state: step, seconds and whatever else training wrote."""

    geometry: Geometry
    weights: dict[str, np.ndarray]
    state: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("weights-*.bin"):
            old.unlink()
        names = self.geometry.shapes() | self.geometry.draft_shapes()
        raw = np.concatenate([bfloat16(self.weights[name]).reshape(-1) for name in names]).tobytes()
        for i, begin in enumerate(range(0, len(raw), SHARD_BYTES)):
            (folder / f"weights-{i}.bin").write_bytes(raw[begin : begin + SHARD_BYTES])
        page = {"geometry": dataclasses.asdict(self.geometry), "state": self.state}
        (folder / "state.json").write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Checkpoint:
        page = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        kept = page["geometry"]
        geometry = Geometry(**{**kept, "rope_sections": tuple(kept["rope_sections"])})
        shards = sorted(folder.glob("weights-*.bin"), key=lambda path: int(path.stem.split("-")[1]))
        raw = np.frombuffer(b"".join(path.read_bytes() for path in shards), np.uint16)
        shapes = geometry.shapes() | geometry.draft_shapes()
        wanted = sum(math.prod(shape) for shape in shapes.values())
        if len(raw) != wanted:
            raise ValueError(f"{folder}: the shards hold {len(raw)} weights, the geometry has {wanted}")
        weights, at = {}, 0
        for name, shape in shapes.items():
            n = math.prod(shape)
            weights[name] = (raw[at : at + n].astype(np.uint32) << 16).view(np.float32).reshape(shape)
            at += n
        return cls(geometry, weights, page["state"])


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper half of each float32, rounded to nearest even; finite values only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

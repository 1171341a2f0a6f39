"""The test packs: GGUF files of another project's converter and quantiser, folded into one archive of 9 MB.

    python tests/data/unpack.py DEST [name ...]      # tiny-q8_0 or tiny-q8_0.gguf; all of them without names

`packs.npz` (an npz whose members are LZMA-packed) holds, per family (tiny, odd, the draft layer):

    <family>.index                the rows of every tensor as numbers into a table of distinct rows; one list serves
                                  every file of the family, because equal rows quantise to equal bytes
    <family>.<type>.<cols>        those rows in one tensor type; `.ids` says which of them occur in this type
    headers, manifest             each file up to its first tensor; which tensor lies where in which file

The float32 rows are kept as byte planes. Rows of a type that `predicted` knows are kept as the exclusive or with its
guess from the float32 rows, so they pack to nearly nothing; a wrong guess would cost space and never a byte.
Every file that leaves is compared with its SHA-256. Cost: about a second for the archive, then a gather per tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
ARCHIVE = HERE / "packs.npz"

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _half(raw: Bytes) -> Floats:
    """Little-endian half precision numbers in the last axis of two bytes."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _codes(x: Floats, scale: Floats, offset: Floats | float, low: int, high: int) -> Bytes:
    """The nearest code of every value; scale 0 gives 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint((x + offset) / scale)
    return np.clip(np.where(scale == 0, 0, q), low, high).astype(np.int16).astype(np.uint8)


def _q8_0(x: Floats, blocks: Bytes) -> Bytes:
    x = x.reshape(-1, 32)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    y = x * np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    q = np.sign(y) * np.floor(np.abs(y) + np.float32(0.5))
    return np.concatenate([d.astype(np.float16).view(np.uint8), q.astype(np.int8).view(np.uint8)], axis=1)


def _q6_k(x: Floats, blocks: Bytes) -> Bytes:
    out = np.zeros_like(blocks)
    scale = _half(blocks[:, 208:])[:, None] * blocks[:, 192:208].view(np.int8)
    q = _codes(x.reshape(-1, 16, 16), scale[..., None].astype(np.float32), 0.0, -32, 31) + np.uint8(32)
    q = q.reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    out[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    out[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    return out


def _k_codes(x: Floats, blocks: Bytes, high: int) -> Bytes:
    """Codes of Q4_K and Q5_K from the scales in the block, (blocks, 4, 2, 32)."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    d, dmin = _half(blocks[:, :2])[:, None], _half(blocks[:, 2:4])[:, None]
    q = _codes(x.reshape(-1, 8, 32), (d * scale)[..., None], (dmin * least)[..., None], 0, high)
    return q.reshape(-1, 4, 2, 32)


def _q4_k(x: Floats, blocks: Bytes) -> Bytes:
    out, q = np.zeros_like(blocks), _k_codes(x, blocks, 15)
    out[:, 16:] = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    return out


def _q5_k(x: Floats, blocks: Bytes) -> Bytes:
    out, q = np.zeros_like(blocks), _k_codes(x, blocks, 31)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    out[:, 16:48] = np.bitwise_or.reduce((q >> 4).reshape(-1, 8, 32) << bit, axis=1)
    out[:, 48:] = ((q[:, :, 0] & 15) | (q[:, :, 1] & 15) << 4).reshape(-1, 128)
    return out


def _bf16(x: Floats, blocks: Bytes) -> Bytes:
    return np.ascontiguousarray(x.view(np.uint8).reshape(-1, 4)[:, 2:])


def _f16(x: Floats, blocks: Bytes) -> Bytes:
    return x.astype(np.float16).view(np.uint8).reshape(-1, 2)


_PREDICT = {
    "BF16": (2, _bf16),
    "F16": (2, _f16),
    "Q8_0": (34, _q8_0),
    "Q6_K": (210, _q6_k),
    "Q5_K": (176, _q5_k),
    "Q4_K": (144, _q4_k),
}


def predicted(kind: str, x: Floats, rows: Bytes) -> Bytes:
    """What `kind` makes of the float32 rows `x`, by the rule that rounds to the nearest code.

    rows    (n, row_bytes): only the scales of the K types are read, and those come out as zeros
    Returns bytes of the same shape; zeros for a type without a rule.
    """
    if kind not in _PREDICT:
        return np.zeros_like(rows)
    size, rule = _PREDICT[kind]
    return rule(x, rows.reshape(-1, size)).reshape(rows.shape)


class Archive:
    """`packs.npz`, decoded member by member as they are asked for."""

    def __init__(self, path: Path = ARCHIVE) -> None:
        self._members = np.load(path)
        self._tables: dict[tuple[str, str, int], Bytes] = {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self._members["manifest"].tobytes())  # type: ignore[no-any-return]

    @cached_property
    def _headers(self) -> Bytes:
        return self._members["headers"]

    def _table(self, family: str, kind: str, cols: int) -> Bytes:
        """Distinct rows in type `kind`, addressed by the numbers of `<family>.index`; cached."""
        key = (family, kind, cols)
        if key not in self._tables:
            name = f"{family}.{kind}.{cols}"
            ids, stored = self._members[name + ".ids"], self._members[name]
            if kind == "F32":
                stored = np.ascontiguousarray(stored.T).reshape(-1, cols * 4)
            elif self.manifest["families"][family]["float"]:
                stored ^= predicted(kind, self._table(family, "F32", cols)[ids].view(np.float32), stored)
            rows = np.zeros((int(ids.max()) + 1, stored.shape[1]), np.uint8)
            rows[ids] = stored
            self._tables[key] = rows
        return self._tables[key]

    def pieces(self, file: str) -> Iterator[Bytes]:
        """The bytes of `file` in order."""
        entry = self.manifest["files"][file]
        family = entry["family"]
        tensors = self.manifest["families"][family]["tensors"]
        index = self._members[f"{family}.index"]
        start, size = entry["header"]
        yield self._headers[start : start + size]
        for number, offset, kind in entry["tensors"]:
            first, n_rows, cols = tensors[number]
            yield np.zeros(offset - size, np.uint8)
            rows = self._table(family, kind, cols)[index[first : first + n_rows]]
            yield rows.reshape(-1)
            size = offset + rows.size
        yield np.zeros(entry["bytes"] - size, np.uint8)

    def names(self) -> list[str]:
        """Packs by the name that `unpack` takes: file names without the ending, shards under one name."""
        return sorted({_pack_name(file) for file in self.manifest["files"]})

    def unpack(self, name: str, dest: Path) -> Path:
        """Writes pack `name` into the folder `dest` unless it is there; returns its (first) file.

        Safe when several processes do the same: a file appears whole or not at all. Raises KeyError for an unknown
        name, ValueError when the bytes are not those that were packed.
        """
        files = sorted(file for file in self.manifest["files"] if _pack_name(file) == name)
        if not files:
            raise KeyError(f"no test pack {name}; there are {', '.join(self.names())}")
        dest.mkdir(parents=True, exist_ok=True)
        for file in files:
            want = self.manifest["files"][file]["sha256"]
            if not (dest / file).is_file() or digest(dest / file) != want:
                self._write(file, dest, want)
        return dest / files[0]

    def _write(self, file: str, dest: Path, want: str) -> None:
        with tempfile.NamedTemporaryFile(dir=dest, prefix=file, delete=False) as out:
            try:
                out.writelines(memoryview(piece) for piece in self.pieces(file))
                out.flush()
                if digest(Path(out.name)) != want:
                    raise ValueError(f"{file}: not the file that was packed")
                Path(out.name).chmod(0o644)
                os.replace(out.name, dest / file)
            except BaseException:
                Path(out.name).unlink()
                raise


def _pack_name(file: str) -> str:
    stem = file.removesuffix(".gguf")
    return stem[: stem.index("-split-")] + "-split" if "-split-" in stem else stem


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def main(args: list[str]) -> int:
    if not args:
        print(__doc__, file=sys.stderr)
        return 2
    archive = Archive()
    for name in args[1:] or archive.names():
        path = archive.unpack(name.removesuffix(".gguf"), Path(args[0]))
        path.touch()  # as new as this script: make compares their ages
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

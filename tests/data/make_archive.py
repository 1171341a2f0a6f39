"""Writes `packs.npz` from GGUF files: python tests/data/make_archive.py FOLDER. `unpack.py` tells the format.

The first part of a file's name is its family. The family's base file, `<family>-f32` or else the only one there is,
numbers the distinct rows. Raises ValueError when two files of a family disagree about what a row becomes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from unpack import ARCHIVE, Bytes, predicted

from strata.engine.pack.gguf import read_gguf

Rows = dict[int, bytes]


class Placed(NamedTuple):
    """A tensor of a file: its rows (n, row_bytes) and the byte where they start."""

    name: str
    kind: str
    cols: int
    rows: Bytes
    offset: int


def placed(path: Path) -> Iterator[Placed]:
    """Tensors in the order of the directory."""
    file = read_gguf(path)
    for t in file.tensors.values():
        data = file.data[t.offset : t.offset + t.n_bytes]
        yield Placed(t.name, t.type.name, t.shape[-1], data.reshape(-1, t.type.row_bytes(t.shape[-1])), t.offset)


class Family:
    """Numbers of the distinct rows of a base file, and the rows themselves in every type that a file has them in."""

    def __init__(self, base: Path) -> None:
        self.tensors: list[tuple[int, int, int]] = []
        self.index: list[int] = []
        self.tables: dict[tuple[str, int], Rows] = {}
        self._number: dict[str, int] = {}
        seen: dict[int, dict[bytes, int]] = {}
        kinds = set()
        for t in placed(base):
            numbers = seen.setdefault(t.cols, {})
            self._number[t.name] = len(self.tensors)
            self.tensors.append((len(self.index), len(t.rows), t.cols))
            self.index += [numbers.setdefault(t.kind.encode() + row.tobytes(), len(numbers)) for row in t.rows]
            kinds.add(t.kind)
        self.is_float = kinds == {"F32"}

    def learn(self, path: Path) -> list[tuple[int, int, str]]:
        """Takes over the rows of a file; returns (number, offset, type) of its tensors by offset."""
        found = []
        for t in placed(path):
            number = self._number[t.name]
            first, n_rows, _ = self.tensors[number]
            table = self.tables.setdefault((t.kind, t.cols), {})
            for row, stored in zip(self.index[first : first + n_rows], t.rows, strict=True):
                if table.setdefault(row, stored.tobytes()) != stored.tobytes():
                    raise ValueError(f"{path.name}: {t.name}: another file has row {row} as other {t.kind} bytes")
            found.append((number, t.offset, t.kind))
        return sorted(found, key=lambda entry: entry[1])

    def members(self, name: str) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays of the archive."""
        yield f"{name}.index", np.array(self.index, np.uint16)
        for (kind, cols), table in self.tables.items():
            ids = sorted(table)
            rows = np.frombuffer(b"".join(table[i] for i in ids), np.uint8).reshape(len(ids), -1)
            if kind == "F32":
                rows = np.ascontiguousarray(rows.reshape(-1, 4).T)
            elif self.is_float:
                floats = b"".join(self.tables["F32", cols][i] for i in ids)
                rows = rows ^ predicted(kind, np.frombuffer(floats, np.float32).reshape(len(ids), cols), rows)
            yield f"{name}.{kind}.{cols}", rows
            yield f"{name}.{kind}.{cols}.ids", np.array(ids, np.uint16)


def build(folder: Path) -> dict[str, np.ndarray]:
    """Every member of the archive by name."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.gguf")):
        groups.setdefault(path.name.split("-")[0], []).append(path)
    members: dict[str, np.ndarray] = {}
    manifest: dict[str, Any] = {"families": {}, "files": {}}
    headers = b""
    for name, paths in groups.items():
        family = Family(next((path for path in paths if path.stem == f"{name}-f32"), paths[0]))
        for path in paths:
            raw, tensors = path.read_bytes(), family.learn(path)
            manifest["files"][path.name] = {
                "family": name,
                "bytes": len(raw),
                "sha256": hashlib.sha256(raw).hexdigest(),
                "header": (len(headers), tensors[0][1]),
                "tensors": tensors,
            }
            headers += raw[: tensors[0][1]]
        manifest["families"][name] = {"float": family.is_float, "tensors": family.tensors}
        members |= family.members(name)
    members["headers"] = np.frombuffer(headers, np.uint8)
    members["manifest"] = np.frombuffer(json.dumps(manifest, separators=(",", ":")).encode(), np.uint8)
    return members


def main(args: list[str]) -> int:
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    members = build(Path(args[0]))
    with zipfile.ZipFile(ARCHIVE, "w") as archive:
        for name, array in members.items():
            info = zipfile.ZipInfo(name + ".npy")  # its fixed date keeps the archive the same in every run
            info.compress_type = zipfile.ZIP_LZMA
            with archive.open(info, "w") as member:
                np.lib.format.write_array(member, array)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A pack: one GGUF file, or the shards of a split one, as a read-only mapping from tensor name to mapped bytes.

Shards   `NAME-00001-of-0000N.gguf` is given, the others are found beside it; split.count, split.no and
         split.tensors.count must agree with what is there
Errors   PackError (file, tensor or key, reason) at `open_pack`; a pack that opened is whole and fits its metadata
Cost     nothing is copied at open; `array` copies tensors that are not F32
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.pack.errors import PackError
from strata.engine.pack.gguf import Bytes, GgufFile, Value, read_gguf
from strata.engine.pack.metadata import Metadata
from strata.engine.pack.spec import DraftSpec, ModelSpec, read_draft, read_spec
from strata.engine.pack.tensors import Wanted, draft_tensors, fitted_shapes, wanted_tensors
from strata.kernels.formats import TensorType, Weight

MAX_SHARDS: Final = 4096
_SHARD_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor as the file stores it. shape: slowest axis first; data: uint8 (bytes,), a view of the mapped file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: Bytes
    path: Path


class Pack(Mapping[str, Tensor]):
    """A model's tensors by name, and what they are for.

    path      the file that was given · paths: all shards in order
    spec      the model's geometry, checked against every tensor
    metadata  the keys of the first file
    extra     names of tensors that the model does not use
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        metadata: Mapping[str, Value],
        tensors: Mapping[str, Tensor],
        spec: ModelSpec,
        wanted: Mapping[str, Wanted] | None = None,
    ) -> None:
        self.paths = paths
        self.metadata = metadata
        self.spec = spec
        shapes = fitted_shapes(paths[0], wanted_tensors(spec) if wanted is None else wanted, tensors)
        self.extra = tuple(sorted(tensors.keys() - shapes.keys()))
        self._tensors = {
            name: Tensor(name, t.type, shapes.get(name, t.shape), t.data, t.path) for name, t in tensors.items()
        }

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def metadata_of_first(self) -> Metadata:
        """The same keys, to be read with a type and a range."""
        return Metadata(self.path, self.metadata)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.data.size for t in self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def weight(self, name: str) -> Weight:
        """A matrix or a stack of matrices, no copy. Raises KeyError, PackError for a vector."""
        t = self[name]
        if len(t.shape) not in (2, 3):
            raise PackError(t.path, name, f"has shape {list(t.shape)}, which is no matrix")
        return Weight(t.type, t.shape, t.data.reshape(*t.shape[:-1], t.type.row_bytes(t.shape[-1])))

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor of type F32, F16 or BF16 as float32 in its shape; a read-only view of the file for F32.

        Raises KeyError, PackError for a block-quantised tensor.
        """
        t = self[name]
        if t.type.name == "F32":
            values = t.data.view("<f4")
        elif t.type.name == "F16":
            values = t.data.view("<f2").astype(np.float32)
        elif t.type.name == "BF16":
            values = (t.data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            raise PackError(t.path, name, f"is {t.type.name}; a float type is needed here")
        return values.reshape(t.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DraftPack:
    """The draft layer of a model. pack: its tensors, with the model's geometry as `spec`.

    output   the output matrix that it uses, of its own file or the model's
    names    ids that it may propose, ascending, int32 (n,); None: all
    """

    pack: Pack
    spec: DraftSpec
    output: Weight
    names: npt.NDArray[np.int32] | None = None


def open_pack(path: Path | str) -> Pack:
    """Opens and checks a pack by its file, or the first file of a split one. Raises PackError."""
    paths, metadata, tensors = _read(Path(path))
    spec = read_spec(metadata, {name: t.shape for name, t in tensors.items()})
    return Pack(paths, metadata.values, tensors, spec)


def open_draft(trunk: Pack, path: Path | str | None = None) -> DraftPack:
    """The draft layer for a model: from a file of its own, or from the model's. Raises PackError."""
    paths, metadata, tensors = _read(Path(path)) if path is not None else (trunk.paths, trunk.metadata_of_first, trunk)
    draft = read_draft(metadata, {name: t.shape for name, t in tensors.items()}, trunk.spec)
    pack = Pack(paths, metadata.values, tensors, trunk.spec, draft_tensors(trunk.spec, draft))
    return DraftPack(pack, draft, (trunk if draft.shared else pack).weight("output.weight"))


def _read(path: Path) -> tuple[tuple[Path, ...], Metadata, dict[str, Tensor]]:
    """Paths, metadata of the first file and tensors of a file or a split one."""
    files = _open_shards(path)
    first = files[0]
    metadata = Metadata(first.path, first.metadata)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for info in file.tensors.values():
            if info.name in tensors:
                raise PackError(file.path, info.name, f"the tensor is also in {tensors[info.name].path.name}")
            data = file.data[info.offset : info.offset + info.n_bytes]
            tensors[info.name] = Tensor(info.name, info.type, info.shape, data, file.path)
    return tuple(file.path for file in files), metadata, tensors


def _open_shards(path: Path) -> list[GgufFile]:
    first = read_gguf(path)
    count = Metadata(path, first.metadata).integer("split.count", 0, MAX_SHARDS, default=0)
    if count <= 1:
        return [first]
    name = _SHARD_NAME.fullmatch(path.name)
    _check_shard(first, 0, count)
    if name is None or int(name["count"]) != count or int(name["number"]) != 1:
        raise PackError(
            path, "split.count", f"the first of {count} shards must be named NAME-00001-of-{count:05d}.gguf"
        )
    files = [first]
    for i in range(1, count):
        beside = path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf")
        if not os.path.exists(beside):
            raise PackError(beside, "", f"is missing: shard {i + 1} of {count} of {path.name}")
        file = read_gguf(beside)
        _check_shard(file, i, count)
        files.append(file)
    wanted = Metadata(path, first.metadata).integer("split.tensors.count", 0, 1 << 31)
    held = sum(len(file.tensors) for file in files)
    if held != wanted:
        raise PackError(path, "split.tensors.count", f"is {wanted}, but the {count} shards hold {held} tensors")
    return files


def _check_shard(file: GgufFile, number: int, count: int) -> None:
    meta = Metadata(file.path, file.metadata)
    given = meta.integer("split.count", 0, MAX_SHARDS)
    if given != count:
        raise PackError(file.path, "split.count", f"is {given}, but the first shard says {count}")
    at = meta.integer("split.no", 0, MAX_SHARDS)
    if at != number:
        if number == 0:
            raise PackError(file.path, "split.no", f"this is shard {at + 1} of {count}; give the first one")
        raise PackError(file.path, "split.no", f"is {at} in shard {number + 1} of {count}; it must be {number}")

"""The order of the hot experts, as a file keeps it.

Format   "STRP", then u32 little-endian: version 1, layers, experts of a layer, slots, n; then n pairs of u16 (layer,
         expert), hottest first
Errors   ProfileError in one line: no such file, one of another model, one that is cut off or names a pair twice;
         OSError where a file cannot be written
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

MAGIC: Final = b"STRP"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<4s5I")

Pair = tuple[int, int]
"""(layer, expert)."""


class ProfileError(Exception):
    """A file that is no profile of this model."""


@dataclass(frozen=True, slots=True)
class Profile:
    """pairs: hottest first, each once · slots: of the cache that it was learned in."""

    layers: int
    experts: int
    slots: int
    pairs: tuple[Pair, ...]


def encode(profile: Profile) -> bytes:
    """The bytes of a profile file."""
    head = _HEAD.pack(MAGIC, VERSION, profile.layers, profile.experts, profile.slots, len(profile.pairs))
    return head + np.array(profile.pairs, "<u2").tobytes()


def decode(raw: bytes, layers: int, experts: int) -> Profile:
    """The profile in a file's bytes, for a model of so many layers and experts."""
    if len(raw) < _HEAD.size or raw[:4] != MAGIC:
        raise ProfileError("is no expert profile")
    _, version, own_layers, own_experts, slots, n = _HEAD.unpack_from(raw)
    if version != VERSION:
        raise ProfileError(f"is of version {version}; {VERSION} is read")
    if (own_layers, own_experts) != (layers, experts):
        raise ProfileError(f"is for {own_layers} layers of {own_experts} experts, the model has {layers} of {experts}")
    if len(raw) != _HEAD.size + 4 * n or n > layers * experts:
        raise ProfileError(f"names {n} pairs in {len(raw) - _HEAD.size} bytes")
    table = np.frombuffer(raw, "<u2", offset=_HEAD.size).reshape(n, 2)
    if n and (int(table[:, 0].max()) >= layers or int(table[:, 1].max()) >= experts):
        raise ProfileError("names a pair that the model does not have")
    pairs = tuple((layer, expert) for layer, expert in table.tolist())
    if len(set(pairs)) != n:
        raise ProfileError("names a pair twice")
    return Profile(layers, experts, slots, pairs)


def read_profile(path: Path, layers: int, experts: int) -> Profile:
    """The profile of a model from its file."""
    most = _HEAD.size + 4 * layers * experts
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
        return decode(raw, layers, experts)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def write_profile(path: Path, profile: Profile) -> None:
    """Put a profile in the place of the file, whole or not at all: a reader finds the old one or the new one."""
    made = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with made.open("wb") as file:
            file.write(encode(profile))
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise

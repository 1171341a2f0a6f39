"""What a parked state belongs to: a model file, its format of keys and values, and the arithmetic of this engine.

Two engines with the same fingerprint continue each other's states to the same bits. In it: the head of every file of
the pack (metadata, names, types and shapes of the tensors), a sample of the bytes of each tensor, which tells models of
one geometry apart, and the words below. Device, context and chunk are not: they change no bit of a state.

Cost     reads the heads, and a few bytes of each tensor; some 0.2 s for a large model, more when the file is cold
"""

from __future__ import annotations

import hashlib
from typing import Final

from strata.engine.pack import Pack
from strata.engine.pack.gguf import read_gguf

STATE_VERSION: Final = 1
"""Goes up when the layout of a state changes, or the bits that are computed for one."""
SAMPLE: Final = 64
SIZE: Final = 32


def fingerprint(pack: Pack, kv: str, arithmetic: str) -> bytes:
    """32 bytes. arithmetic: what computes, "exact" for every backend that has the order of `kernels.ops`."""
    said = hashlib.blake2b(f"strata state {STATE_VERSION} {kv} {arithmetic}\n".encode(), digest_size=SIZE)
    for path in pack.paths:
        file = read_gguf(path)
        begin = min((info.offset for info in file.tensors.values()), default=len(file.data))
        said.update(begin.to_bytes(8, "little"))
        said.update(file.data[:begin].data)
        for info in file.tensors.values():
            middle = info.offset + info.n_bytes // 2
            said.update(file.data[info.offset : info.offset + min(SAMPLE, info.n_bytes)].data)
            said.update(file.data[middle : middle + min(SAMPLE, info.n_bytes - info.n_bytes // 2)].data)
    return said.digest()

"""The archive of test packs gives back what went in."""

from __future__ import annotations

import hashlib

import pytest


def test_every_pack_unpacks_to_the_recorded_hash(packs, golden_index):
    unpacked = {}
    for name in packs.names:
        for path in packs[name].parent.glob(f"{name}*.gguf"):
            unpacked[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert unpacked == {file: entry["sha256"] for file, entry in golden_index["files"].items()}


def test_a_damaged_pack_in_the_cache_is_replaced(packs, tmp_path):
    path = packs._archive.unpack("odd-q2_0", tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:1000] + b"x" + good[1001:])
    assert packs._archive.unpack("odd-q2_0", tmp_path).read_bytes() == good
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_unknown_name_says_which_names_there_are(packs):
    with pytest.raises(KeyError, match=r"tiny-q9.*odd-f32"):
        packs["tiny-q9"]

"""Broken packs: each is refused at once, in one line that names the file, the tensor or key, and the reason."""

from __future__ import annotations

import dataclasses
import os
import struct

import pytest

BIG = (1 << 63) - 32
HUGE = (1 << 64) - 1
LAYERS = "qwen4exp.ple.layers"


def change(entry: str, **fields):
    """Changes fields of a line of the tensor directory."""

    def do(header):
        found = header.entry(entry)
        for name, content in fields.items():
            setattr(found, name, content)

    return do


def put(key: str, kind: str, content):
    return lambda header: header.set(key, kind, content)


def raw(key, content: bytes):
    return lambda header: header.metadata.__setitem__(key, content)


def attribute(**fields):
    return lambda header: [setattr(header, name, content) for name, content in fields.items()]


def drop_key(key: str):
    return lambda header: header.metadata.pop(key)


def drop_tensor(name: str):
    return lambda header: header.tensors.remove(header.entry(name))


def twice(name: str):
    return lambda header: header.tensors.append(dataclasses.replace(header.entry(name), offset=header.data_bytes))


def key_twice(header) -> None:
    header.more_keys = struct.pack("<Q", 12) + b"general.type" + struct.pack("<IB", 7, 1)
    header.n_keys = len(header.metadata) + 1


def array_head(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", 9, kind, count)


CASES = {
    "no magic": (attribute(magic=b"GGML"), "", "is not a GGUF file"),
    "version 1": (attribute(version=1), "version", "version 1 is not read, only 2 and 3"),
    "version of the future": (attribute(version=4), "version", "version 4 is not read"),
    "big-endian": (attribute(version=3 << 24), "version", "big-endian"),
    "tensor count overflows": (attribute(n_tensors=HUGE), "tensor count", f"{HUGE} is more than"),
    "tensor count too large for the list": (attribute(n_tensors=30_000), "name of tensor 164", "a string of 0 bytes"),
    "tensor count past the file": (attribute(n_tensors=30_000, hole=0), "tensor count", "30000 do not fit into the"),
    "key count overflows": (attribute(n_keys=1 << 63), "key count", "is more than"),
    "key twice": (key_twice, "general.type", "twice"),
    "key empty": (raw("", struct.pack("<IB", 7, 1)), "metadata key", "0 bytes; 1 to 65535"),
    "key too long": (raw("k" * 65_536, struct.pack("<IB", 7, 1)), "metadata key", "65536 bytes; 1 to"),
    "key not UTF-8": (raw(b"\xff\xfekey", struct.pack("<IB", 7, 1)), "metadata key", "not UTF-8"),
    "string not UTF-8": (put("general.name", "string", b"caf\xe9"), "general.name", "not UTF-8"),
    "string longer than the file": (raw("general.name", struct.pack("<IQ", 8, BIG)), "general.name", "a string of"),
    "string past the end": (
        raw("general.name", struct.pack("<IQ", 8, 1 << 23)),
        "general.name",
        "the file ends inside",
    ),
    "unknown value type": (raw("general.name", struct.pack("<I", 77)), "general.name", "value type 77 is unknown"),
    "truth value 2": (
        raw("tokenizer.ggml.add_bos_token", struct.pack("<IB", 7, 2)),
        "tokenizer.ggml.add_bos_token",
        "2 is",
    ),
    "array of arrays": (raw(LAYERS, array_head(9, 1)), LAYERS, "array of arrays"),
    "array of unknown type": (
        raw(LAYERS, array_head(13, 1)),
        LAYERS,
        "value type 13 is unknown",
    ),
    "array count overflows": (
        raw(LAYERS, array_head(10, HUGE)),
        LAYERS,
        f"array of {HUGE} elements",
    ),
    "array times size overflows": (
        raw(LAYERS, array_head(10, 1 << 61)),
        LAYERS,
        "does not fit",
    ),
    "string array count": (
        raw("tokenizer.ggml.tokens", array_head(8, 600_000)),
        "tokenizer.ggml.tokens",
        "not fit",
    ),
    "string in an array overflows": (
        raw("tokenizer.ggml.tokens", array_head(8, 2) + struct.pack("<Q", HUGE)),
        "tokenizer.ggml.tokens",
        "the file ends inside string 1 of 2",
    ),
    "last string in an array overflows": (
        raw("tokenizer.ggml.tokens", array_head(8, 1) + struct.pack("<Q", BIG)),
        "tokenizer.ggml.tokens",
        "the file ends inside the last",
    ),
    "alignment no power of two": (put("general.alignment", "u32", 48), "general.alignment", "48 is no power of two"),
    "alignment 0": (put("general.alignment", "u32", 0), "general.alignment", "0 is no power"),
    "alignment too large": (put("general.alignment", "u32", 1 << 30), "general.alignment", "no power of two from 8"),
    "alignment is text": (put("general.alignment", "string", "32"), "general.alignment", "'32' is no"),
    "alignment true": (put("general.alignment", "bool", True), "general.alignment", "True is no"),
    "name too long": (change("output.weight", name="n" * 300), "name of tensor", "300 bytes; 1 to 256"),
    "name not UTF-8": (change("output.weight", name=b"\xc3("), "name of tensor", "not UTF-8"),
    "no dimensions": (change("blk.0.ssm_a", dims=[]), "blk.0.ssm_a", "0 dimensions"),
    "five dimensions": (change("blk.0.ssm_a", dims=[6, 1, 1, 1, 1]), "blk.0.ssm_a", "5 dimensions"),
    "dimension 0": (change("blk.0.ssm_a", dims=[0]), "blk.0.ssm_a", r"shape \[0\]"),
    "dimension overflows": (change("blk.0.ssm_a", dims=[HUGE]), "blk.0.ssm_a", "every dimension"),
    "product overflows to nothing": (
        change("blk.0.ssm_a", dims=[1 << 32, 1 << 32]),
        "blk.0.ssm_a",
        f"{1 << 66} bytes at .* passes the end",
    ),
    "row of half a block": (change("token_embd.weight", dims=[200, 1024]), "token_embd.weight", "no whole number"),
    "unknown tensor type": (change("blk.0.ssm_a", type_id=99), "blk.0.ssm_a", "tensor type 99 is unknown"),
    "removed tensor type": (change("blk.0.ssm_a", type_id=4), "blk.0.ssm_a", "tensor type 4 is unknown"),
    "offset not aligned": (change("blk.0.ssm_a", offset=40), "blk.0.ssm_a", "offset 40 is not aligned to 32"),
    "offset overflows": (change("blk.0.ssm_a", offset=BIG), "blk.0.ssm_a", "passes the end"),
    "offset wraps": (change("blk.0.ssm_a", offset=HUGE - 31), "blk.0.ssm_a", "passes the end"),
    "tensors overlap": (change("token_embd.weight", offset=0), "", "its bytes overlap those of"),
    "tensor twice": (twice("blk.0.ssm_a"), "blk.0.ssm_a", "twice"),
    "embedding missing": (drop_tensor("token_embd.weight"), "token_embd.weight", "the tensor is missing"),
    "head missing": (drop_tensor("output.weight"), "output.weight", "missing"),
    "expert stack missing": (drop_tensor("blk.5.ffn_up_exps.weight"), "blk.5.ffn_up_exps.weight", "missing"),
    "delta-net part missing": (drop_tensor("blk.0.ssm_dt.bias"), "blk.0.ssm_dt.bias", "missing"),
    "indexer part missing": (drop_tensor("blk.2.indexer.k_norm.weight"), "blk.2.indexer.k_norm.weight", "missing"),
    "n-gram table missing": (drop_tensor("per_layer_token_embd.weight"), "per_layer_token_embd.weight", "missing"),
    "n-gram part missing": (drop_tensor("blk.3.ple_conv1d.weight"), "blk.3.ple_conv1d.weight", "missing"),
    "shape against metadata": (
        change("blk.2.attn_q.weight", dims=[384, 192]),
        "blk.2.attn_q.weight",
        r"has shape \[192, 384\], but the metadata ask for \[384, 192\]",
    ),
    "experts against metadata": (
        put("qwen4exp.expert_count", "u32", 25),
        "blk.0.ffn_gate_inp.weight",
        r"ask for \[25, 192\]",
    ),
    "embedding of another width": (change("token_embd.weight", dims=[96, 2048]), "token_embd.weight", "has shape"),
    "table of another width": (change("per_layer_token_embd.weight", dims=[64, 1280]), "per_layer_token", "has shape"),
    "table too short": (change("per_layer_token_embd.weight", dims=[32, 2513]), "per_layer_token", "at least 2514"),
    "norm block-quantised": (
        change("output_hc_norm.weight", type_id=8),
        "output_hc_norm.weight",
        "is Q8_0; only F32, F16 and BF16",
    ),
    "control characters in a name": (change("blk.0.ssm_a", name="a\nb\x1b[2J", type_id=99), r"a\nb\x1b[2J", "type 99"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_header_is_refused_by_name(case, header, refused, tmp_path):
    break_it, what, reason = CASES[case]
    header.hole = header.data_bytes + (1 << 16)
    break_it(header)
    header.alignment = 32
    refused(header.write(tmp_path / "broken.gguf"), what, reason)


@pytest.mark.parametrize("n_bytes", [1, 3, 4, 7, 8, 23, 24, 40, 1_000, 20_000, 40_000, -5_000, -1])
def test_a_truncated_file_is_refused(n_bytes, packs, refused, tmp_path):
    whole = packs["odd-q2_0"].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:n_bytes])
    refused(path, "", "is not a GGUF file" if 0 < n_bytes < 4 else "the file ends inside|not fit|passes the end")


def test_every_cut_through_a_small_header_is_refused(new_header, refused, tmp_path):
    header = new_header()
    header.set("general.name", "string", "x")
    header.set("some.array", "array", ("string", ["a", "b"]))
    header.add("t", (2, 2), "F32")
    raw_header = header.encode()
    path = tmp_path / "cut.gguf"
    for n in range(1, len(raw_header)):
        path.write_bytes(raw_header[:n])
        refused(path, "", "not a GGUF|ends inside|do not fit|does not fit")


def test_what_is_no_file_is_refused(refused, tmp_path):
    refused(tmp_path / "absent.gguf", "cannot be opened", "No such file")
    refused(tmp_path, "is a folder", "give the GGUF file")
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "is empty", "")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is not a regular file", "")
    os.symlink(tmp_path / "loop.gguf", tmp_path / "loop.gguf")
    refused(tmp_path / "loop.gguf", "cannot be opened", "symbolic links")


def test_strings_that_only_together_are_too_long_are_refused(header, refused, tmp_path):
    for i in range(17):
        header.set(f"long.{i}", "string", "x" * (1 << 20))
    refused(header.write(tmp_path / "long.gguf"), "long.15", "the strings of this header pass 16777216 bytes")


def test_a_million_empty_strings_take_less_than_a_second(new_header, refused, tmp_path):
    header = new_header()
    header.set("a", "array", ("string", [""] * (1 << 20)))
    header.set("b", "array", ("string", [""]))
    refused(header.write(tmp_path / "many.gguf"), "b", "pass 1048576 elements")

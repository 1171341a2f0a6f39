"""What a pack says about its tensors is what the file holds, by the word of another GGUF reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.pack import PackError, open_pack
from strata.engine.pack.gguf import Array, read_gguf

READABLE = [
    "odd-f32",
    "odd-q8_0",
    "tiny-bf16",
    "tiny-iq1_m",
    "tiny-iq2_m",
    "tiny-iq3_xxs",
    "tiny-iq4_xs",
    "tiny-q4_k_m",
    "tiny-q5_k_m",
]


@pytest.mark.parametrize("name", READABLE)
def test_tensors_are_where_another_reader_finds_them(name, packs):
    pack, other = open_pack(packs[name]), gguf.GGUFReader(packs[name])
    assert [t.name for t in other.tensors] == list(pack)
    for theirs in other.tensors:
        ours = pack[theirs.name]
        assert ours.type.name == theirs.tensor_type.name
        stored = tuple(int(n) for n in reversed(theirs.shape))
        assert ours.shape in (stored, (1, *stored))
        assert ours.data.tobytes() == theirs.data.tobytes(), theirs.name
    assert pack.n_bytes == sum(int(t.n_bytes) for t in other.tensors)


def test_metadata_are_what_another_reader_reads(packs):
    ours, theirs = read_gguf(packs["tiny-q4_k_m"]).metadata, gguf.GGUFReader(packs["tiny-q4_k_m"]).fields
    assert ours.keys() == {key for key in theirs if not key.startswith("GGUF.")}
    for key, value in ours.items():
        want = theirs[key].contents()
        if isinstance(value, Array):
            assert value.count == len(want)
            if value.kind != "string":
                assert value.numbers() == want
        else:
            assert value == want and type(value) is type(want)


@pytest.mark.parametrize("name", ["tiny-bf16", "odd-q8_0", "odd-f32"])
def test_small_tensors_come_as_the_float32_of_another_reader(name, packs):
    pack, seen = open_pack(packs[name]), set()
    for theirs in gguf.GGUFReader(packs[name]).tensors:
        kind = pack[theirs.name].type
        if kind.is_float and theirs.n_bytes < 1 << 20:
            got = pack.array(theirs.name)
            want = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            assert got.dtype == np.float32 and got.shape == pack[theirs.name].shape and got.flags.c_contiguous
            assert got.tobytes() == want.tobytes()
            seen.add(kind.name)
    assert seen == {"tiny-bf16": {"F32", "BF16"}, "odd-q8_0": {"F32", "F16"}, "odd-f32": {"F32"}}[name]


def test_nothing_is_copied_at_open_and_nothing_can_be_written(packs):
    pack = open_pack(packs["tiny-q8_0"])
    for name, tensor in pack.items():
        assert not tensor.data.flags.owndata and not tensor.data.flags.writeable, name
    assert np.shares_memory(pack.array("output_hc_norm.weight"), pack["output_hc_norm.weight"].data)
    stack = pack.weight("blk.0.ffn_gate_exps.weight")
    assert np.shares_memory(stack.data, pack["blk.0.ffn_gate_exps.weight"].data)
    assert (stack.experts, stack.rows, stack.cols) == (16, 256, 256)


def test_the_shared_experts_gate_is_a_matrix_of_one_row_however_it_is_stored(packs):
    converted, quantised = open_pack(packs["tiny-f32"]), open_pack(packs["tiny-q8_0"])
    name = "blk.0.ffn_gate_inp_shexp.weight"
    assert converted[name].shape == quantised[name].shape == converted.weight(name).shape == (1, 256)
    assert converted.array(name).tobytes() == quantised.array(name).tobytes()


def test_a_vector_is_no_weight_and_a_quantised_matrix_no_array(packs):
    pack = open_pack(packs["tiny-q8_0"])
    with pytest.raises(PackError, match=r"tiny-q8_0.gguf: output_hc_norm.weight: has shape \[1024\]"):
        pack.weight("output_hc_norm.weight")
    with pytest.raises(PackError, match=r"output.weight: is Q8_0; a float type is needed"):
        pack.array("output.weight")
    with pytest.raises(KeyError):
        pack.weight("blk.99.attn_q.weight")


INTEGERS = {
    kind: st.integers(0 if kind[0] == "u" else -(1 << int(kind[1:]) - 1), (1 << int(kind[1:]) - (kind[0] == "i")) - 1)
    for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
}
NUMBERS = INTEGERS | {
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
    "bool": st.booleans(),
}
SCALARS = st.one_of([st.tuples(st.just(kind), numbers) for kind, numbers in (NUMBERS | {"string": st.text()}).items()])
ARRAYS = st.one_of(
    [
        st.tuples(st.just("array"), st.tuples(st.just(kind), st.lists(numbers, max_size=20)))
        for kind, numbers in (NUMBERS | {"string": st.text()}).items()
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    version=st.sampled_from([2, 3]),
    alignment=st.sampled_from([8, 32, 64, 4096]),
    metadata=st.dictionaries(st.text(min_size=1), st.one_of(SCALARS, ARRAYS), max_size=12),
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=6),
)
def test_what_is_written_is_read(version, alignment, metadata, shapes, new_header, tmp_path):
    header = new_header(version=version, alignment=alignment)
    for key, (kind, content) in metadata.items():
        header.set(key, kind, content)
    header.set("general.alignment", "u32", alignment)
    for i, shape in enumerate(shapes):
        header.add(f"t{i}", tuple(shape), "F16")
    file = read_gguf(header.write(tmp_path / "any.gguf"))
    assert file.version == version
    for key, (kind, content) in metadata.items():
        got = file.metadata[key]
        if key == "general.alignment":
            continue
        if kind != "array":
            assert got == content
        elif content[0] == "string":
            assert got.count == len(content[1])
        else:
            assert got.numbers() == content[1]
    for i, shape in enumerate(shapes):
        tensor = file.tensors[f"t{i}"]
        assert tensor.shape == tuple(shape) and tensor.offset % alignment == 0
        assert tensor.offset >= len(header.encode())

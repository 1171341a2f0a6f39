"""Every block of every layer against the recorded intermediates of one prompt, and the state that it leaves.

A model may reach near logits with a block that is a little wrong; here the first wrong block is named.
"""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.reference.qsa import rotate, selected
from strata.kernels.reference.scalar import rms

LIMIT = {"reference": 2e-5, "cpu": 2e-5}
BACKENDS = ("reference", "cpu")
MODELS = ("tiny", "odd")


def layer_blocks(recorder, spec) -> list[dict]:
    """The calls of a forward sorted by layer and block."""
    calls = iter(recorder.calls)
    _take(calls, "dequantize")
    layers = []
    for layer, recurrent in enumerate(spec.recurrent):
        got: dict = {}
        if spec.ple and layer == spec.ple.layer:
            _take(calls, "ple_rows")
            args, after = _take(calls, "ple")
            got["ple_out"] = (after - args[1]).reshape(len(after), -1)
            got["ple_args"] = args
        got["attn_hc.mixed"], got["attn_hc.inject"] = _take(calls, "hyper_mix")[1]
        _take(calls, "linear")
        if recurrent:
            _take(calls, "gdn")
        else:
            _take(calls, "qsa_store")
            got["attend_args"] = _take(calls, "qsa_attend")[0]
        got["gdn_out" if recurrent else "attn_out"] = _take(calls, "linear")[1][0]
        _take(calls, "hyper_add")
        got["mlp_hc.mixed"], got["mlp_hc.inject"] = _take(calls, "hyper_mix")[1]
        got["moe_args"], got["moe_out"] = _take(calls, "moe")
        args, _ = _take(calls, "hyper_add")
        x, beta, y = args
        got["out"] = (x + beta[:, :, None] * y[:, None]).reshape(len(x), -1)
        layers.append(got)
    layers.append({"final_mixed": _take(calls, "hyper_mix")[1][0]})
    return layers


def _take(calls, name):
    got, args, result = next(calls)
    assert got == name
    return args, result


@pytest.fixture(scope="module")
def blocks(recorded, pack_of, golden):
    kept: dict = {}

    def run(model, backend, prompt="len17"):
        key = (model, backend, prompt)
        if key not in kept:
            recorder = recorded(f"{model}-f32", backend, golden(f"{model}-hf")[f"{prompt}.ids"])
            kept[key] = recorder, layer_blocks(recorder, pack_of(f"{model}-f32").spec)
        return kept[key]

    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "block",
    [
        *("attn_hc.mixed", "attn_hc.inject", "gdn_out", "attn_out"),
        *("mlp_hc.mixed", "mlp_hc.inject", "moe_out", "ple_out", "out"),
    ],
)
def test_each_block_gives_the_recorded_values(blocks, golden, backend, model, block):
    hf, seen = golden(f"{model}-hf"), 0
    for layer, got in enumerate(blocks(model, backend)[1]):
        if block in got:
            difference = np.abs(got[block] - hf[f"len17.L{layer}.{block}"]).max()
            assert difference <= LIMIT[backend], f"layer {layer}"
            seen += 1
    assert seen == sum(k.endswith(f".{block}") and k.startswith("len17.L") for k in hf)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_router_picks_the_recorded_experts(blocks, golden, backend, model):
    hf = golden(f"{model}-hf")
    recorder, layers = blocks(model, backend)
    for layer, got in enumerate(layers[:-1]):
        weights, x, used = got["moe_args"]
        logits = recorder.linear([weights.router], x)[0]
        experts, shares = recorder.route(logits, used)
        name = f"len17.L{layer}.router"
        assert np.abs(logits - hf[f"{name}.logits"]).max() <= LIMIT[backend]
        order, wanted = np.argsort(experts, 1), np.argsort(hf[f"{name}.experts"], 1)
        picked = np.take_along_axis(experts, order, 1)
        assert (picked == np.take_along_axis(hf[f"{name}.experts"], wanted, 1)).all(), f"layer {layer}"
        shares, recorded = np.take_along_axis(shares, order, 1), np.take_along_axis(hf[f"{name}.weights"], wanted, 1)
        assert np.abs(shares - recorded).max() <= LIMIT[backend]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_give_the_recorded_values(blocks, golden, backend, model):
    hf = golden(f"{model}-hf")
    recorder, layers = blocks(model, backend)
    name, _, embedded = recorder.calls[0]
    assert name == "dequantize"
    np.testing.assert_array_equal(embedded, hf["len17.embed"])
    assert np.abs(layers[-1]["final_mixed"][-1] - hf["len17.final_mixed"][-1]).max() <= LIMIT[backend]
    for got in layers[:-1]:
        if "ple_args" in got:
            weights, _, rows = got["ple_args"][:3]
            layer = [k for k in hf if k.startswith("len17.L") and k.endswith("ple_embed")]
            e = recorder.dequantize(weights.table, rows.reshape(-1)).reshape(len(rows), -1)
            np.testing.assert_array_equal(e, hf[layer[0]])


@pytest.mark.parametrize("prompt", ["len17", "len300"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_query_attends_to_the_recorded_tokens(blocks, golden, pack_of, backend, model, prompt):
    hf, n = golden(f"{model}-hf"), len(golden(f"{model}-hf")[f"{prompt}.ids"])
    layers = blocks(model, backend, prompt)[1]
    for layer in pack_of(f"{model}-f32").spec.attention_layers:
        pages, tables, _, positions, _, index_q, norms, rope, budget, eps = layers[layer]["attend_args"]
        iq = rotate(rms(index_q.astype(np.float64), eps) * norms.index_q, positions, rope)
        used = tables[0][: -(-n // 64)]
        index_blocks = pages.block[used].reshape(-1, pages.block.shape[2]).astype(np.float64)
        mask = selected(iq, index_blocks, positions, n, pages.r, budget)
        wanted = np.unpackbits(hf[f"{prompt}.L{layer}.qsa_mask"], axis=-1)[:, :n].astype(bool)
        assert (mask == wanted).all(), f"layer {layer}: rows {np.flatnonzero((mask != wanted).any(1))}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_prompt_leaves_the_recorded_residual_in_every_layer(blocks, golden, backend, model):
    hf = golden(f"{model}-hf")
    for layer, got in enumerate(blocks(model, backend, "len300")[1][:-1]):
        assert np.abs(got["out"][-2:] - hf[f"len300.L{layer}.out.tail"]).max() <= LIMIT[backend], f"layer {layer}"


def tiled(heads: np.ndarray, key_heads: int) -> np.ndarray:
    """Value heads (first axis) from the checkpoint's order to the file's: position i*K + k holds head k*(V/K) + i."""
    return heads.reshape(key_heads, -1, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_and_decode_leave_the_recorded_state(sequences, golden, pack_of, backend, model):
    hf, spec = golden(f"{model}-hf"), pack_of(f"{model}-f32").spec
    sequence = sequences(f"{model}-f32", backend)
    sequence.feed(hf["len17.ids"])
    for token in hf["len17.decode_ids"]:
        sequence.feed([int(token)])
    recurrent, limit = sequence.state.recurrent, LIMIT[backend]

    state = hf["len17.state.L0.recurrent"]
    assert np.abs(recurrent.gdn[0].state[0] - tiled(state, spec.gdn_key_heads)).max() <= limit
    assert np.abs(recurrent.gdn[0].state[0] - state).max() > 100 * limit, "grouped and tiled must be told apart"

    conv = hf["len17.state.L0.conv"].T[1:]
    keys = 2 * spec.gdn_key_heads * spec.gdn_head_dim
    values = conv[:, keys:].T.reshape(spec.gdn_value_heads, -1)
    values = tiled(values, spec.gdn_key_heads).reshape(-1, len(conv)).T
    assert np.abs(recurrent.gdn[0].conv[0] - np.concatenate([conv[:, :keys], values], 1)).max() <= limit

    ple_conv = hf[f"len17.state.L{spec.ple.layer}.ple_conv"]
    assert np.abs(recurrent.ple_conv[0] - ple_conv.T).max() <= limit
    assert recurrent.history[0].tolist() == hf[f"len17.state.L{spec.ple.layer}.ngram_ids"].tolist()

"""The traps of this architecture, each with a test that a wrong reading would fail.

Where the shapes fit either way, the wrong reading is put into the model (or into the pack) and must be seen: the logits
move by far more than the limit that the recorded ones are met with.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.formats import BY_NAME
from strata.kernels.reference.qsa import rotate, selected
from strata.kernels.reference.scalar import rms

LIMIT, SEEN = 1e-4, 1e-2
TINY = "tiny-f32"


@pytest.fixture(scope="module")
def distance(sequences, golden):
    """distance(pack, prompt): largest difference of the reference backend's logits from the recorded ones."""

    def measure(pack, prompt: str) -> float:
        hf = golden("tiny-hf")
        wanted = hf[f"{prompt}.last_logits"]
        return float(np.abs(sequences(pack, "reference").feed(hf[f"{prompt}.ids"], want=len(wanted)) - wanted).max())

    return measure


def test_trap_1_ratios_of_zero_are_warned_of_and_run_dense(distance, sequences, golden, altered, pack_of, caplog):
    pack = pack_of(TINY)
    warned = replace(pack.spec, ratios=(0,) * pack.spec.layers, warnings=("attention layers 3, 7 run dense",))
    dense = altered(pack, spec=warned)
    with caplog.at_level(logging.WARNING):
        assert distance(dense, "len17") <= LIMIT
    assert "tiny-f32.gguf: attention layers 3, 7 run dense" in caplog.text
    assert distance(dense, "len130") > SEEN
    ids = golden("tiny-hf")["len130.ids"]
    everything = altered(pack, spec=replace(pack.spec, index_budget=512))
    got, wanted = (sequences(p, "reference").feed(ids)[0] for p in (dense, everything))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_trap_2_no_part_of_the_next_best_block_is_selected(distance, sequences, golden):
    assert distance(TINY, "len130") <= LIMIT
    llama = golden("tiny-f32-llama")["len130.last_logits"]
    got = sequences(TINY, "reference").feed(golden("tiny-hf")["len130.ids"], want=len(llama))
    assert np.abs(got - llama).max() > SEEN, "the recording that selects too much must be told apart"


def test_trap_3_n_grams_stop_at_end_of_text_and_not_at_end_of_turn(distance, altered, pack_of):
    pack = pack_of(TINY)
    end_of_turn, end_of_text = pack.spec.end_tokens[:2]
    assert (end_of_turn, end_of_text, pack.spec.ple.eos) == (1000, 998, 998)
    assert distance(TINY, "eos") <= LIMIT
    assert distance(altered(pack, spec=replace(pack.spec, ple=replace(pack.spec.ple, eos=1000))), "eos") > SEEN


def grouped(pack) -> dict[str, np.ndarray]:
    """The delta net tensors with their value heads back in the checkpoint's order."""
    spec, out = pack.spec, {}
    d, heads = spec.gdn_head_dim, spec.gdn_value_heads
    head = np.arange(heads).reshape(-1, spec.gdn_key_heads).T.ravel()
    values = (head[:, None] * d + np.arange(d)).ravel()
    channels = np.concatenate([np.arange(spec.gdn_channels - len(values)), spec.gdn_channels - len(values) + values])
    order = {
        "attn_qkv.weight": channels,
        "attn_gate.weight": values,
        "ssm_beta.weight": head,
        "ssm_alpha.weight": head,
        "ssm_a": head,
        "ssm_dt.bias": head,
        "ssm_conv1d.weight": channels,
    }
    for layer in spec.gdn_layers:
        for name, rows in order.items():
            out[f"blk.{layer}.{name}"] = pack.array(f"blk.{layer}.{name}")[rows]
        out[f"blk.{layer}.ssm_out.weight"] = pack.array(f"blk.{layer}.ssm_out.weight")[:, values]
    return out


def test_trap_4_grouped_value_heads_are_told_apart_from_tiled_ones(distance, altered, pack_of):
    assert distance(TINY, "len17") <= LIMIT
    assert distance(altered(pack_of(TINY), arrays=grouped(pack_of(TINY))), "len17") > SEEN


def test_trap_5_a_query_head_is_its_query_then_its_gate(distance, altered, pack_of):
    pack = pack_of(TINY)
    spec, swapped = pack.spec, {}
    for layer in spec.attention_layers:
        name = f"blk.{layer}.attn_q.weight"
        by_head = pack.array(name).reshape(2, spec.heads, spec.head_dim, spec.hidden)
        swapped[name] = by_head.swapaxes(0, 1).reshape(-1, spec.hidden)
    assert distance(altered(pack, arrays=swapped), "len17") > SEEN


def test_trap_6_the_gated_norm_has_no_one_added_and_every_other_norm_has(distance, altered, pack_of):
    pack = pack_of(TINY)
    names = {f"blk.{layer}.ssm_norm.weight" for layer in pack.spec.gdn_layers}
    assert distance(altered(pack, arrays={n: 1 + pack.array(n) for n in names}), "len17") > SEEN
    others = [n for n in pack if n.endswith("norm.weight") and n not in names]
    assert len(others) > 20
    assert distance(altered(pack, arrays={n: pack.array(n) - 1 for n in others}), "len17") > SEEN


def test_trap_6_the_output_gate_is_a_logistic_and_not_a_silu(distance, sequences, golden, recorded):
    hf = golden("tiny-hf")
    recorder = recorded(TINY, "reference", hf["len17.ids"])
    at = next(i for i, call in enumerate(recorder.calls) if call[0] == "gdn")
    z, y = recorder.calls[at][1][2].astype(np.float64), recorder.calls[at][2]
    (out,), _ = recorder.calls[at + 1][1]
    matrix = out.data.view(np.float32).reshape(out.shape)
    np.testing.assert_allclose(y @ matrix.T, hf["len17.L0.gdn_out"], atol=1e-5)
    assert np.abs((z * y) @ matrix.T - hf["len17.L0.gdn_out"]).max() > SEEN


def test_trap_7_indexer_keys_are_pooled_raw_then_normed_then_turned_at_the_first_token(recorded, golden):
    hf = golden("tiny-hf")
    n, layer = 300, 3
    recorder = recorded(TINY, "reference", hf["len300.ids"])
    store = next(args for name, args, _ in recorder.calls if name == "qsa_store")
    attend = next(args for name, args, _ in recorder.calls if name == "qsa_attend")
    (pages, tables, _, positions, _, _, raw, norms, rope, eps), index_q = store, attend[5]
    kept = pages.raw[tables[0][: -(-n // 64)]].reshape(-1, raw.shape[1])[:n]
    np.testing.assert_array_equal(kept, raw)
    wanted = np.unpackbits(hf[f"len300.L{layer}.qsa_mask"], axis=-1)[:, :n].astype(bool)
    iq = rotate(rms(index_q.astype(np.float64), eps) * norms.index_q, positions, rope)
    blocks = raw.astype(np.float64).reshape(-1, pages.r, raw.shape[1])
    first = positions[:: pages.r]

    def mask(keys: np.ndarray) -> np.ndarray:
        return selected(iq, keys, positions, n, pages.r, attend[8])

    def normed(x: np.ndarray) -> np.ndarray:
        return rms(x, eps) * norms.index_k

    turned = rotate(normed(raw.astype(np.float64)), positions, rope).reshape(blocks.shape)
    assert (mask(rotate(normed(blocks.mean(1)), first, rope)) == wanted).all()
    assert (mask(rotate(normed(blocks).mean(1), first, rope)) != wanted).any(), "norm before pooling"
    assert (mask(turned.mean(1)) != wanted).any(), "rotation before pooling"
    assert (mask(rotate(normed(blocks.mean(1)), first + pages.r - 1, rope)) != wanted).any(), (
        "rotation at the last token"
    )


def test_trap_8_a_query_can_lose_its_own_complete_block(golden, pack_of):
    """The masks that every layer must meet hold such queries: a privilege would fail them."""
    spec = pack_of(TINY).spec
    for layer in spec.attention_layers:
        mask = np.unpackbits(golden("tiny-hf")[f"len300.L{layer}.qsa_mask"], axis=-1)[:, :300].astype(bool)
        own = np.diagonal(mask)
        at_end = (np.arange(300) + 1) % spec.ratios[layer] == 0
        assert own[~at_end].all()
        assert (~own[at_end]).any()


def test_trap_9_the_hash_of_these_tokens_does_not_fit_a_double(pack_of, recorded, golden):
    ids, spec = golden("tiny-hf")["len300.ids"], pack_of(TINY).spec.ple
    recorder = recorded(TINY, "reference", ids)
    rows = next(result for name, _, result in recorder.calls if name == "ple_rows")
    for t in range(2, 300):
        if spec.eos in ids[t - 2 : t + 1]:
            continue
        a, b = int(ids[t]) * spec.multipliers[0], int(ids[t - 1]) * spec.multipliers[1]
        assert rows[t, 0] == (a ^ b) % spec.sizes[0] + spec.offsets[0]
    products = [int(i) * spec.multipliers[0] for i in ids]
    assert any(int(float(p)) != p for p in products)


def test_trap_10_the_dilated_convolution_keeps_nine_vectors_over_an_end_of_text(sequences, golden, pack_of):
    hf, spec = golden("tiny-hf"), pack_of(TINY).spec
    ids = hf["eos.ids"]
    after = int(np.flatnonzero(ids == spec.ple.eos)[-1]) + 1
    assert after < len(ids)
    logits = []
    for clear in (False, True):
        sequence = sequences(TINY, "reference")
        assert sequence.state.recurrent.ple_conv.shape == (1, 9, spec.wide)
        sequence.feed(ids[:after])
        if clear:
            sequence.state.recurrent.ple_conv[:] = 0
        logits.append(sequence.feed(ids[after:])[0])
    assert np.abs(logits[0] - hf["eos.last_logits"][-1]).max() <= LIMIT
    assert np.abs(logits[1] - hf["eos.last_logits"][-1]).max() > SEEN


def test_trap_11_rows_that_are_no_whole_blocks_have_another_type_than_the_file_is_named_after(
    pack_of, golden, sequences
):
    pack = pack_of("tiny-q4_k_m")
    assert pack["blk.0.ffn_gate_shexp.weight"].type is BY_NAME["Q4_K"]
    down = pack["blk.0.ffn_down_shexp.weight"]
    assert down.shape[-1] % 256 and down.type is not BY_NAME["Q4_K"] and not down.type.is_float
    wanted = golden("tiny-q4_k_m-hfdq")["len17.last_logits"][-1]
    got = sequences("tiny-q4_k_m", "reference").feed(golden("tiny-hf")["len17.ids"])[0]
    assert np.abs(got - wanted).max() <= 1e-3


def test_trap_12_a_shard_may_hold_nothing_but_the_n_gram_table(pack_of):
    pack = pack_of("tiny-q2_0-split")
    assert [name for name in pack if pack[name].path == pack.paths[1]] == ["per_layer_token_embd.weight"]
    assert len(pack) == len(pack_of("tiny-q2_0"))


def test_trap_13_equal_scores_decide_nothing_in_the_recorded_selections(golden_index):
    prompts = [p for model in golden_index["hf"].values() for p in model["prompts"].values()]
    assert len(prompts) == 12 and all(p["block_ties"] == 0 for p in prompts)


def test_trap_15_activations_are_not_rounded_to_the_type_of_the_weights(distance, golden_index):
    llama = golden_index["hf_vs_llama"]["tiny-bf16.gguf ubatch 512"]
    for prompt in ("len17", "eos"):
        assert llama[prompt]["prefill"]["max_abs"] > SEEN
        assert distance("tiny-bf16", prompt) <= LIMIT

"""Logits against two other implementations: float weights against transformers, quantised ones against transformers on
the same weights dequantised, and no farther from that than llama.cpp is."""

from __future__ import annotations

import numpy as np
import pytest

FLOAT = ("tiny-f32", "tiny-bf16", "odd-f32")
QUANTISED = (
    *(f"tiny-{q}" for q in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "iq3_s", "iq3_xxs")),
    *(f"tiny-{q}" for q in ("iq2_xs", "iq2_m", "iq1_m", "q2_0")),
    "odd-q8_0",
    "odd-q2_0",
)
PROMPTS = ("len1", "len3", "len17", "eos", "len130", "len300")
QUANTISED_PROMPTS = ("len17", "eos", "len130")
FLOAT_LIMIT = {"reference": 1e-4, "cpu": 2e-3}


def prompt_ids(golden, name: str, prompt: str) -> np.ndarray:
    return golden(f"{name.split('-')[0]}-hf")[f"{prompt}.ids"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_float_weights_give_the_recorded_logits_and_greedy_text(sequences, golden, backend, name, prompt):
    hf, limit = golden(f"{name.split('-')[0]}-hf"), FLOAT_LIMIT[backend]
    last, after = hf[f"{prompt}.last_logits"], hf[f"{prompt}.decode_logits"]
    sequence = sequences(name, backend)
    logits = sequence.feed(hf[f"{prompt}.ids"], want=len(last))
    assert np.abs(logits - last).max() <= limit
    assert (logits.argmax(1) == last.argmax(1)).all()
    ids, rows = sequence.greedy(logits[-1], len(after))
    assert ids == hf[f"{prompt}.decode_ids"].tolist()
    assert np.abs(rows - after).max() <= limit
    assert (rows.argmax(1) == after.argmax(1)).all()
    sequence.state.check()


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_give_the_logits_of_the_same_weights_dequantised(sequences, golden, name):
    hfdq = golden(f"{name}-hfdq")
    for prompt in ("len17", "eos"):
        logits = sequences(name, "reference").feed(prompt_ids(golden, name, prompt))[0]
        wanted = hfdq[f"{prompt}.last_logits"][-1]
        assert np.abs(logits - wanted).max() <= 1e-3, prompt
        assert logits.argmax() == wanted.argmax(), prompt


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_greedy_text_is_that_of_the_same_weights_dequantised(sequences, expanded, golden, name):
    hfdq = golden(f"{name}-hfdq")
    model = sequences(expanded(name), "reference", n_slots=len(QUANTISED_PROMPTS))
    for slot, prompt in enumerate(QUANTISED_PROMPTS):
        logits = model.feed(prompt_ids(golden, name, prompt), slot)[0]
        assert np.abs(logits - hfdq[f"{prompt}.last_logits"][-1]).max() <= 1e-3, prompt
        wanted = hfdq[f"{prompt}.decode_ids"].tolist()
        assert model.greedy(logits, len(wanted), slot)[0] == wanted, prompt


@pytest.mark.parametrize("prompt", QUANTISED_PROMPTS)
@pytest.mark.parametrize("name", QUANTISED)
def test_eight_bit_activations_stay_as_near_as_those_of_llama_cpp(sequences, golden, name, prompt):
    wanted = golden(f"{name}-hfdq")[f"{prompt}.last_logits"][-1]
    llama = golden(f"{name}-llama")[f"{prompt}.last_logits"][-1]
    logits = sequences(name, "cpu").feed(prompt_ids(golden, name, prompt))[0]
    assert np.abs(logits - wanted).max() <= np.abs(llama - wanted).max()
    assert logits.argmax() == wanted.argmax()

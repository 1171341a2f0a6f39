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
LONGER = ("tiny-q8_0", "tiny-q4_k_m", "tiny-iq3_s", "tiny-q2_0", "odd-q8_0")
"""Those that write a text in every run; the others do in the soak, and their logits are compared in every run."""
PROMPTS = ("len1", "len3", "len17", "eos", "len130", "len300")
QUANTISED_PROMPTS = ("len17", "eos", "len130")
FLOAT_LIMIT = {"reference": 1e-4, "cpu": 2e-3}


def prompt_ids(golden, name: str, prompt: str) -> np.ndarray:
    return golden(f"{name.split('-')[0]}-hf")[f"{prompt}.ids"]


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_float_weights_give_the_recorded_logits_and_greedy_text(sequences, golden, backend, name):
    hf, limit = golden(f"{name.split('-')[0]}-hf"), FLOAT_LIMIT[backend]
    sequence, first = sequences(name, backend, n_slots=len(PROMPTS)), []
    for slot, prompt in enumerate(PROMPTS):
        last = hf[f"{prompt}.last_logits"]
        logits = sequence.feed(hf[f"{prompt}.ids"], slot, want=len(last))
        assert np.abs(logits - last).max() <= limit, prompt
        assert (logits.argmax(1) == last.argmax(1)).all(), prompt
        first.append(logits[-1])
    ids, rows = sequence.greedy(np.stack(first), 16)
    for slot, prompt in enumerate(PROMPTS):
        after = hf[f"{prompt}.decode_logits"]
        assert ids[slot].tolist() == hf[f"{prompt}.decode_ids"].tolist(), prompt
        assert np.abs(rows[slot] - after).max() <= limit, prompt
        assert (rows[slot].argmax(1) == after.argmax(1)).all(), prompt
    sequence.state.check()


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_give_the_logits_of_the_same_weights_dequantised(sequences, golden, name):
    hfdq = golden(f"{name}-hfdq")
    for prompt in ("len17", "eos"):
        logits = sequences(name, "reference").feed(prompt_ids(golden, name, prompt))[0]
        wanted = hfdq[f"{prompt}.last_logits"][-1]
        assert np.abs(logits - wanted).max() <= 1e-3, prompt
        assert logits.argmax() == wanted.argmax(), prompt


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LONGER else pytest.mark.soak) for name in QUANTISED]
)
def test_quantised_greedy_text_is_that_of_the_same_weights_dequantised(sequences, expanded, golden, name):
    hfdq = golden(f"{name}-hfdq")
    sequence = sequences(expanded(name), "reference", n_slots=len(QUANTISED_PROMPTS))
    first = [sequence.feed(prompt_ids(golden, name, p), slot)[0] for slot, p in enumerate(QUANTISED_PROMPTS)]
    ids, _ = sequence.greedy(np.stack(first), 32)
    for slot, prompt in enumerate(QUANTISED_PROMPTS):
        assert np.abs(first[slot] - hfdq[f"{prompt}.last_logits"][-1]).max() <= 1e-3, prompt
        assert ids[slot].tolist() == hfdq[f"{prompt}.decode_ids"].tolist(), prompt


@pytest.mark.parametrize("name", QUANTISED)
def test_eight_bit_activations_stay_as_near_as_those_of_llama_cpp(sequences, golden, name):
    """The distance of a file is the root mean square over all its recorded logits: both round activations to eight
    bits, and the largest of a few thousand differences of two such roundings is a draw of noise."""
    hfdq, llama = golden(f"{name}-hfdq"), golden(f"{name}-llama")
    ours, theirs = [], []
    for prompt in QUANTISED_PROMPTS:
        wanted = hfdq[f"{prompt}.last_logits"][-1]
        logits = sequences(name, "cpu").feed(prompt_ids(golden, name, prompt))[0]
        assert logits.argmax() == wanted.argmax(), prompt
        ours.append(logits - wanted)
        theirs.append(llama[f"{prompt}.last_logits"][-1] - wanted)
    assert np.sqrt(np.mean(np.square(ours))) <= np.sqrt(np.mean(np.square(theirs)))

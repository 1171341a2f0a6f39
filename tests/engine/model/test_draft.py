"""The draft layer against the recorded drafts of another implementation, and against itself in other pieces."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.model.draft import DraftLayer, halves
from strata.engine.pack import open_draft
from strata.engine.state.slots import StatePool
from strata.kernels import reference
from strata.kernels.formats import BY_NAME, Weight

CONTEXT = 160
LIMIT = {"reference": 1e-5, "cpu": 0.03}
"""Of the distance, against the size of what was recorded: both root mean squares. cpu: activations of eight bits."""
PROMPTS = ("len17", "eos", "len130")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def made(request, packs, pack_of):
    """Model and draft layer on a backend."""
    trunk, device = pack_of("tiny-f32"), HostDevice(request.param, 1)
    model = Model(trunk, device, CONTEXT)
    return request.param, model, DraftLayer(open_draft(trunk, packs["mtp-tiny-q8_0"]), device, model.rope, model.ends)


class Drafts:
    """A sequence in the draft layer. `feed`: X of some rows and the tokens after them -> X' of these rows."""

    def __init__(self, layer: DraftLayer) -> None:
        self.layer = layer
        self.state = StatePool(layer.spec, 1, CONTEXT)

    def feed(self, x: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        rows = Rows.of([(0, self.state.length(0), tokens)])
        self.state.reserve(0, len(rows))
        out = self.layer(x, rows, self.state)
        self.state.advance(0, len(rows))
        return out


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(got - wanted)) / np.mean(np.square(wanted))))


def residual(model: Model, ids: np.ndarray) -> np.ndarray:
    return model.read(Rows.of([(0, 0, ids)]), model.new_state(1))[1]


def test_the_drafts_of_a_recorded_residual_are_the_recorded_ones(made, golden):
    backend, _, layer = made
    recorded = golden("mtp-tiny-q8_0")
    x = recorded["len17.trunk_wide"].reshape(17, layer.spec.streams, layer.spec.hidden)
    out = Drafts(layer).feed(x, recorded["len17.next_ids"])
    wide = recorded["len17.global.wide_out.tail"]
    assert distance(out[-len(wide) :].reshape(wide.shape), wide) <= LIMIT[backend]
    wanted = recorded["len17.global.last_logits"]
    assert distance(layer.logits(out[-len(wanted) :]), wanted) <= LIMIT[backend]
    other = recorded["len17.per_stream.last_logits"]  # eight bits do not tell the two norms apart
    assert backend == "cpu" or distance(other, wanted) > 2 * LIMIT[backend], "nor does the recording"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_behind_the_model_itself_are_the_recorded_ones(made, golden, prompt):
    backend, model, layer = made
    ids, recorded = golden("tiny-hf")[f"{prompt}.ids"], golden("mtp-tiny-q8_0")
    drafts = Drafts(layer)
    out = drafts.feed(residual(model, ids), recorded[f"{prompt}.next_ids"])[-1:]
    logits = layer.logits(out)
    last = recorded[f"{prompt}.global.last_logits"][-1]
    assert distance(logits[0], last) <= LIMIT[backend]
    for token, wanted in zip(
        recorded[f"{prompt}.global.chain_ids"], [*recorded[f"{prompt}.global.chain_logits"], None], strict=True
    ):
        assert int(logits[0].argmax()) == token
        if wanted is not None:  # a further draft feeds back its own residual
            out = drafts.feed(out, np.array([token], np.int32))
            logits = layer.logits(out)
            assert distance(logits[0], wanted) <= LIMIT[backend]


def test_what_the_draft_layer_computes_depends_on_no_row_beside(made, golden):
    backend, model, layer = made
    if backend == "reference":
        pytest.skip("its sums are NumPy's, which look at the number of rows")
    ids, recorded = golden("tiny-hf")["len130.ids"], golden("mtp-tiny-q8_0")
    x, tokens = residual(model, ids), recorded["len130.next_ids"]
    whole, pieces = Drafts(layer), Drafts(layer)
    out = whole.feed(x, tokens)
    parts = [pieces.feed(x[a:b], tokens[a:b]) for a, b in ((0, 1), (1, 70), (70, 78), (78, 130))]
    assert np.array_equal(out, np.concatenate(parts))
    assert whole.state.digest(0) == pieces.state.digest(0)


def test_a_matrix_whose_half_is_no_whole_block_is_cut_all_the_same():
    rng = np.random.default_rng(4)
    data = rng.integers(0, 255, (6, BY_NAME["Q8_0"].row_bytes(96)), np.uint8)
    data.reshape(6, 3, 34)[:, :, 1] &= 0x3B  # finite scales
    w = Weight(BY_NAME["Q8_0"], (6, 96), data)
    whole = reference.dequantize(w, np.arange(6))
    first, second = (reference.dequantize(part, np.arange(6)) for part in halves(w))
    assert np.array_equal(np.concatenate([first, second], 1), whole)
    even = Weight(BY_NAME["Q8_0"], (6, 64), np.ascontiguousarray(data[:, :68]))
    assert [part.type.name for part in halves(even)] == ["Q8_0", "Q8_0"]

"""The training model against an independent implementation's recordings, and its fast ways against slow ones."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: only training the demo pack needs it")

from strata.bench.demo_pack.config import SMOKE, Geometry  # noqa: E402
from strata.bench.demo_pack.delta import RESET, delta_rule, unit_lower_inverse  # noqa: E402
from strata.bench.demo_pack.export import as_in_training, read  # noqa: E402
from strata.bench.demo_pack.layers import _OfUsed, grouped  # noqa: E402
from strata.bench.demo_pack.model import DemoModel, depths, round_q4_0, rows_of, together  # noqa: E402
from strata.bench.demo_pack.optim import orthogonal  # noqa: E402

TINY = Geometry(
    vocab=1024, ngram_eos=998, budget=64, head_dim=128, value_heads=12, experts=16, expert_width=256, shared_width=320,
    ngram_base=509, rope_base=1e7, context=4096,
)  # fmt: skip
PROMPTS = ("len17", "eos", "len130", "len300")


@pytest.fixture(scope="module")
def tiny(packs) -> DemoModel:
    """The recorded model with its draft layer."""
    weights = as_in_training(read(packs["tiny-f32"]) | read(packs["mtp-tiny-q8_0"]))
    model = DemoModel(TINY)
    with torch.no_grad():
        for name, p in model.tensors().items():
            p.copy_(torch.from_numpy(weights[name]).view(p.shape))
    return model


def run(model: DemoModel, conversations: list[list[np.ndarray]], length: int, **flags):
    """One row for each list of conversations, one after the other at multiples of the block."""
    ids = np.full((len(conversations), length), model.geometry.ngram_eos)
    segment = np.full(ids.shape, -1, np.int32)
    for row, several in enumerate(conversations):
        at = 0
        for number, tokens in enumerate(several):
            ids[row, at : at + len(tokens)] = tokens
            end = at + -(-len(tokens) // model.geometry.block) * model.geometry.block
            segment[row, at:end] = number
            at = end
    with torch.no_grad():
        return model(torch.from_numpy(ids).long(), rows_of(torch.from_numpy(segment), model.geometry, 4), **flags)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_is_trained_is_the_recorded_model(tiny, golden, prompt):
    hf, drafts = golden("tiny-hf"), golden("mtp-tiny-q8_0")
    ids, want = hf[f"{prompt}.ids"], hf[f"{prompt}.last_logits"]
    followed = f"{prompt}.next_ids" in drafts
    tokens = np.append(ids, drafts[f"{prompt}.next_ids"][-1:]) if followed else ids
    out = run(tiny, [[tokens]], -(-len(tokens) // 64) * 64, sparse=True)
    rows = slice(len(ids) - len(want), len(ids))
    assert np.abs(out.logits[0, rows].numpy() - want).max() < 1e-4
    if followed:
        assert np.abs(out.draft[0, rows].numpy() - drafts[f"{prompt}.global.last_logits"]).max() < 1e-4


@pytest.mark.parametrize("prompt", ["len17", "len130"])
def test_second_and_third_drafts_are_learned_as_they_are_made(tiny, golden, prompt, monkeypatch):
    recorded = golden("mtp-tiny-q8_0")
    ids, said = golden("tiny-hf")[f"{prompt}.ids"], recorded[f"{prompt}.global.chain_ids"]
    tokens, n = np.concatenate([ids, recorded[f"{prompt}.next_ids"][-1:], said]), len(ids)
    depth = torch.ones(1, -(-len(tokens) // 64) * 64, dtype=torch.int64)
    depth[0, n], depth[0, n + 1] = 2, 3
    monkeypatch.setattr("strata.bench.demo_pack.model.depths", lambda position, begin: depth)
    out = run(tiny, [[tokens]], depth.shape[1], sparse=True, chain=0)
    assert int(out.draft[0, n - 1].argmax()) == said[0]
    for row, wanted in enumerate(recorded[f"{prompt}.global.chain_logits"][:2], start=n):
        assert np.abs(out.chain.logits[0, row].numpy() - wanted).max() < 1e-4


def test_a_draft_behind_a_draft_begins_in_its_own_conversation():
    position = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
    found = [depths(position, begin)[0].tolist() for begin in range(4)]
    assert found[0] == [1, 1, 1, 1, 2, 3, 1, 1, 1, 1, 1, 1]
    assert found[3] == [1, 1, 1, 2, 3, 1, 1, 2, 1, 1, 1, 2]
    assert {depth[8] for depth in found} == {1} and found[1][8:] == [1, 2, 3, 1]


def test_a_conversation_does_not_see_the_one_before_it_in_its_row(tiny, golden):
    hf = golden("tiny-hf")
    one, two = hf["len130.ids"], hf["len17.ids"]
    out = run(tiny, [[one, two]], 192, sparse=True)
    want = hf["len17.last_logits"]
    end = 132 + len(two)
    assert np.abs(out.logits[0, end - len(want) : end].numpy() - want).max() < 1e-4


def test_selection_drops_nothing_below_the_budget(tiny, golden):
    ids = golden("tiny-hf")["len300.ids"]
    dense, sparse = (run(tiny, [[ids[:64]]], 64, sparse=flag).logits for flag in (False, True))
    assert torch.equal(dense, sparse)
    dense, sparse = (run(tiny, [[ids]], 320, sparse=flag).logits for flag in (False, True))
    assert (dense - sparse).abs().max() > 1e-2


def test_chunked_delta_rule_is_the_recurrence_token_by_token():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (torch.nn.functional.normalize(draw(2, 192, 3, 16), dim=-1) for _ in range(3))
    g, beta = -draw(2, 192, 3).abs(), torch.sigmoid(draw(2, 192, 3))
    k[:, 70:120] = k[:, 70:71]  # equal keys: powers of the triangle would grow
    g[:, [0, 100]] = RESET
    state, want = torch.zeros(2, 3, 16, 16, dtype=torch.float64), []
    for t in range(192):
        state = state * (0.0 if t in (0, 100) else g[:, t].exp()[..., None, None])
        error = v[:, t] - (k[:, t, :, :, None] * state).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        want.append((q[:, t, :, :, None] * state).sum(2))
    assert (delta_rule(q, k, v, g, beta) - torch.stack(want, 1)).abs().max() < 1e-10


def test_inverse_and_its_gradient_are_those_of_a_solver():
    m = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tril(-1) * 0.2
    ours, theirs = m.clone().requires_grad_(), m.clone().requires_grad_()
    eye = torch.eye(64, dtype=torch.float64)
    found, want = unit_lower_inverse(ours), torch.linalg.solve(eye + theirs.tril(-1), eye.expand(3, -1, -1))
    assert torch.allclose(found, want, rtol=1e-9, atol=1e-9)
    weights = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * weights).sum().backward()
    (want * weights).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-8, atol=1e-8)


def test_grouped_products_in_bfloat16_are_those_expert_by_expert():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 32, generator=generator), torch.randn(4, 48, 32, generator=generator)
    ends = torch.tensor([10, 10, 40, 64], dtype=torch.int32)
    fast, slow = grouped(x.bfloat16(), w.bfloat16(), ends).float(), grouped(x, w, ends)
    assert (fast - slow).abs().max() < 0.03 * slow.abs().max()


def test_an_expert_without_a_row_learns_nothing():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 32, generator=generator), torch.randn(4, 48, 32, generator=generator).requires_grad_()
    held = _OfUsed.apply(w, torch.tensor([0, 20, 20, 64], dtype=torch.int32))
    (gradient,) = torch.autograd.grad(held, w, torch.full_like(w, torch.nan))
    assert [bool(of.isnan().all()) for of in gradient] == [False, True, False, True]
    assert not gradient[[0, 2]].any()
    grouped(x, w, torch.tensor([0, 20, 20, 64], dtype=torch.int32)).sum().backward()
    assert not w.grad[[0, 2]].any() and w.grad[1].any() and w.grad[3].any()


def test_every_second_probe_is_where_an_answer_is_given():
    segment = torch.zeros(2, 64, dtype=torch.int32)
    answering = torch.zeros(2, 64, dtype=torch.bool)
    answering[0, 40:60] = answering[1, 10:13] = True
    probes = rows_of(segment, SMOKE, 16, torch.Generator().manual_seed(0), answering).probes
    assert probes.shape == (2, 16)
    assert answering[0, probes[0, 8:]].all() and answering[1, probes[1, 8:]].sum() == 3


def test_gradients_do_not_reach_the_trunk_through_the_indexer():
    model = DemoModel(SMOKE, seed=3)
    ids = torch.randint(0, 4000, (2, 64), generator=torch.Generator().manual_seed(0))
    out = model(ids, rows_of(torch.zeros(2, 64, dtype=torch.int32), SMOKE, 8), sparse=True)
    out.indexer.backward()
    reached = {name for name, p in model.tensors().items() if p.grad is not None and p.grad.abs().max() > 0}
    assert reached and all("indexer." in name for name in reached)


def test_rounding_is_that_of_the_file():
    gguf = pytest.importorskip("gguf")
    w = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    w[3, :32] = 0
    kind = gguf.GGMLQuantizationType.Q4_0
    stored = gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind)
    assert np.array_equal(round_q4_0(w).numpy(), stored)
    found = together(round_q4_0, {"one": w, "two": w[:3]})
    assert np.array_equal(found["one"].numpy(), stored) and np.array_equal(found["two"].numpy(), stored[:3])


def test_orthogonal_updates_have_singular_values_near_one():
    m = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(m))
    assert values.min() > 0.5 and values.max() < 1.4

"""Training: batches come whole and in order, losses count what they should, a leg goes on where the last one ended."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: only training the demo pack needs it")

from strata.bench.demo_pack import train  # noqa: E402
from strata.bench.demo_pack.checkpoint import Checkpoint  # noqa: E402
from strata.bench.demo_pack.config import SMOKE  # noqa: E402
from strata.bench.demo_pack.data.mixture import TASKS  # noqa: E402
from strata.bench.demo_pack.data.stream import Batch, Stream  # noqa: E402
from strata.bench.demo_pack.export import export  # noqa: E402
from strata.bench.demo_pack.feed import SLACK, Feed, FeedFailed, aligned  # noqa: E402
from strata.bench.demo_pack.model import Chain, Output  # noqa: E402
from strata.bench.demo_pack.objective import DRAFT_WEIGHT, PROMPT_WEIGHT, Objective, Tokens, judge  # noqa: E402
from strata.bench.demo_pack.optim import MOST, SPIKE, Clip  # noqa: E402
from strata.engine.device.host import HostDevice  # noqa: E402
from strata.engine.model import Model, Rows  # noqa: E402
from strata.engine.pack import open_pack  # noqa: E402

END = SMOKE.ngram_eos
torch.set_num_threads(1)  # on busy cores a team of spinning threads is slower by far
STREAM = Stream(context=256, rows=4, seed=5)


def conversations(batch: Batch) -> list[tuple[list[int], list[bool], int]]:
    """Tokens, mask and task of every conversation, without the padding after its end."""
    found = []
    for row in range(len(batch.ids)):
        for number in range(batch.segment[row].max() + 1):
            at = np.flatnonzero((batch.segment[row] == number) & (batch.task[row] != 255))
            found.append((batch.ids[row, at].tolist(), batch.mask[row, at].tolist(), int(batch.task[row, at[0]])))
    return found


def test_alignment_loses_no_token_of_a_conversation():
    for index in range(4):
        before = STREAM.batch(index)
        after = aligned(before, SMOKE.block, END)
        assert after.ids.shape == (4, 256 + SLACK)
        assert conversations(after) == conversations(before)
        begins = np.diff(after.segment, prepend=-2) != 0
        assert (np.nonzero(begins & (after.segment >= 0))[1] % SMOKE.block == 0).all()
        assert not after.mask[after.task == 255].any()


def test_conversations_without_room_are_left_out_whole():
    n = 90
    full = Batch(
        np.zeros((1, n), np.int32),
        np.ones((1, n), bool),
        np.arange(n, dtype=np.int32)[None],
        np.zeros((1, n), np.uint8),
    )
    after = aligned(full, 4, END)
    assert after.segment.max() + 1 == -(-(n + SLACK) // 4) == after.mask.sum()


@pytest.mark.parametrize("n_workers", [1, 3])
def test_workers_give_the_batches_in_order(n_workers):
    with Feed(STREAM.batch, SMOKE.block, END, start=2, n_workers=n_workers) as feed:
        for index in range(2, 8):
            want = aligned(STREAM.batch(index), SMOKE.block, END)
            assert all(np.array_equal(a, b) for a, b in zip(next(feed), want, strict=True))


def _fails(index: int) -> Batch:
    raise RuntimeError(f"no batch {index}")


def test_a_failing_worker_says_why():
    with Feed(_fails, 4, END, n_workers=1) as feed, pytest.raises(FeedFailed, match="no batch 0"):
        next(feed)


def tokens_of(batch: Batch) -> Tokens:
    task = torch.from_numpy(batch.task).long().clamp_max(len(TASKS))
    return Tokens(
        torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.mask), torch.from_numpy(batch.segment), task
    )


def test_losses_count_answers_of_their_own_conversation_only():
    batch = aligned(STREAM.batch(0), SMOKE.block, END)
    generator = torch.Generator().manual_seed(0)
    shape = (*batch.ids.shape, SMOKE.vocab)
    logits, draft = (torch.randn(shape, generator=generator) for _ in range(2))
    zero = torch.zeros(())
    found = Objective()(Output(logits, draft, zero, zero), tokens_of(batch))
    log, drafted = (x.log_softmax(-1).numpy() for x in (logits, draft))
    answers, prompts, drafts, by_task = [], [], [], np.zeros(len(TASKS))
    for row, t in np.ndindex(*batch.ids.shape):
        for ahead, kept, by in ((1, answers, log), (2, drafts, drafted)):
            inside = t + ahead < shape[1] and batch.segment[row, t] == batch.segment[row, t + ahead] != -1
            if not inside:
                continue
            value = -by[row, t, batch.ids[row, t + ahead]]
            if batch.mask[row, t + ahead]:
                kept.append(value)
                by_task[batch.task[row, t]] += value * (ahead == 1)
            elif ahead == 1:
                prompts.append(value)
    assert found.answers.item() == pytest.approx(np.mean(answers), rel=1e-4)
    assert found.draft.item() == pytest.approx(np.mean(drafts), rel=1e-4)
    rest = found.total - found.answers - 0.3 * found.draft
    assert rest.item() == pytest.approx(PROMPT_WEIGHT * np.mean(prompts), rel=1e-3)
    assert np.allclose(found.by_task[0].numpy(), by_task, rtol=1e-4)
    assert not found.by_depth.any()


def test_drafts_behind_drafts_count_where_an_answer_goes_on():
    batch = aligned(STREAM.batch(0), SMOKE.block, END)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((*batch.ids.shape, SMOKE.vocab), generator=generator)
    depth = torch.randint(1, 4, batch.ids.shape, generator=generator)
    zero, said = torch.zeros(()), logits.log_softmax(-1)
    plain = Objective()(Output(logits, logits, zero, zero), tokens_of(batch))
    found = Objective()(Output(logits, logits, zero, zero, Chain(logits, depth)), tokens_of(batch))
    for which, wanted in enumerate((2, 3)):
        at = [
            (row, t)
            for row, t in np.ndindex(*batch.ids[:, 2:].shape)
            if depth[row, t] == wanted
            and batch.mask[row, t + 2]
            and batch.segment[row, t] == batch.segment[row, t + 2] != -1
        ]
        losses = [-said[row, t, batch.ids[row, t + 2]].item() for row, t in at]
        assert found.by_depth[:, which].tolist() == pytest.approx([sum(losses), len(losses)], rel=1e-4)
    deep = found.by_depth[0].sum() / found.by_depth[1].sum()
    assert (found.total - plain.total).item() == pytest.approx(DRAFT_WEIGHT * deep.item(), rel=1e-3)


def test_the_model_itself_learns_nothing_from_drafts_behind_drafts():
    training = train.Training(SMOKE, 1, "cpu", lambda f: f)
    tokens = training.on_device(aligned(STREAM.batch(0), SMOKE.block, END))
    out = training.forward(tokens, 0.0, chain=1)
    assert out.chain is not None
    out.chain.logits.sum().backward()
    learning = {name for name, p in training.model.tensors().items() if p.grad is not None and p.grad.any()}
    last = f"blk.{SMOKE.layers}."
    assert {name for name in learning if not name.startswith(last)} == {"token_embd.weight", "output.weight"}
    assert {f"{last}attn_q.weight", f"{last}nextn.eh_proj.weight"} <= learning


def test_judge_wants_every_token_of_an_answer():
    batch = aligned(STREAM.batch(0), SMOKE.block, END)
    said = torch.nn.functional.one_hot(torch.from_numpy(np.roll(batch.ids, -1, 1)).long(), SMOKE.vocab).float()
    draft = said.roll(-1, 1)
    zero = torch.zeros(())
    page = judge(Output(said, draft, zero, zero), tokens_of(batch)).page()
    assert all(figures["right"] == figures["draft"] == 1.0 for figures in page.values())
    row, t = (int(x[0]) for x in np.nonzero(batch.mask))
    said[row, t - 1] = said[row, t - 1].roll(1)
    missed = judge(Output(said, draft, zero, zero), tokens_of(batch)).page()
    task = TASKS[batch.task[row, t]]
    assert missed[task]["right"] == pytest.approx(1 - 1 / missed[task]["answers"])


def test_judge_counts_drafts_by_how_far_they_go():
    tokens = tokens_of(aligned(STREAM.batch(0), SMOKE.block, END))
    said = torch.nn.functional.one_hot(tokens.ids.roll(-1, 1), SMOKE.vocab).float()
    draft, zero = said.roll(-1, 1), torch.zeros(())
    depth = (torch.arange(tokens.ids.shape[1]) % 4 + 1).clamp_max(3).expand_as(tokens.ids)
    deep = torch.where((depth == 2)[..., None], draft, draft.roll(1, -1))  # all thirds are wrong
    page = judge(Output(said, draft, zero, zero, Chain(deep, depth)), tokens).page()
    for figures in page.values():
        assert (figures["draft"], figures.get("second", 1.0), figures.get("third", 0.0)) == (1.0, 1.0, 0.0)
    assert sum("second" in figures and "third" in figures for figures in page.values()) > 3


def test_rate_warms_up_and_falls():
    assert train.rate_at(0.0, 0) == pytest.approx(1 / train.WARM_STEPS)
    assert train.rate_at(0.5, 10_000) == pytest.approx((1 + train.LAST) / 2)
    assert train.rate_at(1.0, 10_000) == train.rate_at(1.5, 10_000) == pytest.approx(train.LAST)


def test_a_loss_that_is_no_number_ends_the_leg():
    training = train.Training(SMOKE, 1, "cpu", lambda f: f)
    losses = training.learn(aligned(STREAM.batch(0), SMOKE.block, END), 0.0)
    log = train.Log()
    log.add(losses._replace(total=torch.tensor(math.nan)))
    with pytest.raises(train.Diverged, match="lower --rate"):
        log.line(training, train.Clock(0.0, 1.0, 1.0))


def test_a_batch_whose_gradients_are_no_numbers_costs_a_step_and_not_the_training():
    good, bad = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    clip = Clip("cpu")
    good.grad, bad.grad = torch.full((3,), 4.0), torch.tensor([0.0, math.nan])
    clip([good, bad])
    assert not good.grad.any() and not bad.grad.any()
    assert clip.bad == 1 and clip.usual == MOST
    good.grad, bad.grad = torch.full((3,), 4.0), torch.zeros(2)
    clip([good, bad])
    assert good.grad.norm().item() == pytest.approx(1.0) and clip.bad == 1


def test_a_gradient_far_above_the_usual_one_is_held_down():
    p, clip = torch.nn.Parameter(torch.ones(4)), Clip("cpu")
    for _ in range(500):
        p.grad = torch.full((4,), 0.05)
        clip([p])
        assert p.grad.norm().item() == pytest.approx(0.1)
    p.grad = torch.full((4,), 0.4)
    clip([p])
    assert p.grad.norm().item() == pytest.approx(0.1 * SPIKE, rel=0.01)


def test_a_loss_that_is_no_number_is_left_out_of_the_line():
    training, log = train.Training(SMOKE, 1, "cpu", lambda f: f), train.Log()
    losses = training.learn(aligned(STREAM.batch(0), SMOKE.block, END), 0.0)
    log.add(losses)
    log.add(losses._replace(total=torch.tensor(math.nan)))
    log.line(training, train.Clock(0.0, 1.0, 1.0))
    assert log.lines[0]["total"] == pytest.approx(losses.total.item(), abs=1e-3)


def test_exact_resuming_learns_what_one_run_learns(tmp_path):
    batches = [aligned(STREAM.batch(i), SMOKE.block, END) for i in range(4)]
    whole, first, second = (train.Training(SMOKE, 1, "cpu", lambda f: f) for _ in range(3))
    for batch in batches:
        whole.learn(batch, 0.4)
    for batch in batches[:2]:
        first.learn(batch, 0.4)
    first.save_exact(tmp_path / train.EXACT)
    second.load_exact(tmp_path / train.EXACT)
    assert second.step == 2
    for batch in batches[2:]:
        second.learn(batch, 0.4)
    for name, p in whole.model.tensors().items():
        assert torch.equal(second.model.tensors()[name], p), name


def test_further_drafts_wait_for_a_model_that_moves_less_and_not_in_another_course():
    training = train.Training(SMOKE, 1, "cpu", lambda f: f, chain_from=0.4)
    batch = aligned(STREAM.batch(0), SMOKE.block, END)
    assert not training.learn(batch, 0.39).by_depth.any()
    training.step = 2
    assert training.learn(batch, 0.4).by_depth[1].all()
    assert not training.learn(batch, 0.4).by_depth.any()
    found = []
    for step in range(10):
        training.step = step
        found.append(training.chain(0.5))
    assert found == [0, None, 1, None, 2, None, 3, None, 0, None]
    training.step, training.course = 2, 800.0
    assert training.chain(0.0) == 1


def test_the_draft_layer_alone_follows_a_rate_of_its_own():
    training = train.Training(SMOKE, 1, "cpu", lambda f: f, rate=0.0, draft_rate=1e-2)
    before = {name: p.detach().clone() for name, p in training.model.tensors().items()}
    for i in range(2):
        training.learn(aligned(STREAM.batch(i), SMOKE.block, END), 0.4)
    changed = {name for name, p in training.model.tensors().items() if not torch.equal(before[name], p)}
    assert changed and changed <= set(SMOKE.draft_shapes())


def test_a_leg_does_not_go_on_from_weights_that_are_no_numbers(tmp_path):
    first, second = (train.Training(SMOKE, 1, "cpu", lambda f: f) for _ in range(2))
    next(iter(first.model.tensors().values())).data.view(-1)[5] = math.nan
    first.save_exact(tmp_path / train.EXACT)
    with pytest.raises(ValueError, match="--resume"):
        second.load_exact(tmp_path / train.EXACT)


def test_another_course_has_a_schedule_of_its_own(tmp_path):
    clock = train.Clock(before=800.0, seconds=600.0, total=1400.0, course=800.0)
    assert clock.progress == pytest.approx(0.0, abs=0.01) and clock.end == 600.0
    assert train.Clock(before=1100.0, seconds=600.0, total=1400.0, course=800.0).progress == pytest.approx(
        0.5, abs=0.01
    )
    common = ["--smoke", "--device", "cpu", "--no-compile", "--workers", "0", "--tokens", "512", "--steps", "1"]
    common += ["--minutes", "20", "--out", str(tmp_path)]
    train.main([*common, "--total-minutes", "20"])
    train.main([*common, "--total-minutes", "40", "--resume", str(tmp_path), "--again", "--round-from", "0"])
    state = Checkpoint.load(tmp_path).state
    assert state["course"] == pytest.approx(state["pages"][0]["seconds"], abs=0.06) and len(state["pages"]) == 2
    with pytest.raises(ValueError, match=r"--total-minutes 0\.001 leaves none"):
        train.main([*common, "--total-minutes", "0.001", "--resume", str(tmp_path)])


def test_nothing_is_compiled_twice_for_one_length():
    """Each costs ten seconds of a card: not for judging, not for further drafts, not for rounded weights."""
    names: list[str] = []

    def compiled(f):
        def backend(graph, inputs):
            names.append(f.__name__)
            return graph.forward

        return torch.compile(f, dynamic=False, backend=backend)

    training = train.Training(SMOKE, 1, "cpu", compiled)
    training.dtype = torch.bfloat16  # as on a card: grouped products
    batch = aligned(STREAM.batch(0), SMOKE.block, END)
    for step, progress in enumerate((0.0, 0.0, 0.5, 0.5, 0.9, 0.9)):
        training.step = step
        training.learn(batch, progress)
    training.judged([batch], 1.0)
    once = {"recurrent", "experts", "asking", "answering", "choice", "ple_layer", "head", "cross_entropy"}
    assert sorted(names) == sorted(once)


@pytest.mark.gpu
def test_compiled_training_on_a_card_learns_what_plain_training_learns():
    if not torch.cuda.is_available():
        pytest.skip("no card that PyTorch can use")
    batches = [aligned(Stream(context=1024, rows=8, seed=3).batch(i), SMOKE.block, END) for i in range(6)]
    plain, compiled = (
        train.Training(SMOKE, 1, "cuda", way) for way in (lambda f: f, functools.partial(torch.compile, dynamic=False))
    )
    for progress, batch in zip((0.0, 0.0, 0.0, 0.5, 0.9, 0.9), batches, strict=True):
        one, two = plain.learn(batch, progress), compiled.learn(batch, progress)
        for name, a, b in zip(one._fields[:-2], one, two, strict=False):
            assert a.item() == pytest.approx(b.item(), rel=0.02), (name, progress)


def test_a_short_run_learns_goes_on_and_is_served(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "WARM_STEPS", 5)
    common = ["--smoke", "--device", "cpu", "--no-compile", "--workers", "0", "--tokens", "1024"]
    common += ["--minutes", "20", "--total-minutes", "20"]
    first, second = tmp_path / "first", tmp_path / "second"
    train.main([*common, "--steps", "50", "--out", str(first)])
    train.main([*common, "--steps", "3", "--out", str(second), "--resume", str(first)])
    one, two = (Checkpoint.load(folder).state for folder in (first, second))
    assert (one["step"], two["step"]) == (50, 53) and two["seconds"] > one["seconds"]
    pages = json.loads((second / "log.json").read_text())
    start = math.log(SMOKE.vocab)
    assert [page["lines"][-1]["step"] for page in pages] == [50, 53]
    assert pages[1]["lines"][-1]["answers"] < start - 1.0, capsys.readouterr().out
    path = export(Checkpoint.load(second), tmp_path, ("Q8_0",))[0]
    model = Model(open_pack(path), HostDevice(), max_context=128)
    state, ids = model.new_state(1), []
    logits = model.forward(Rows.of([(0, 0, list(range(40)))]), state, [39])
    for position in range(40, 60):
        ids.append(int(logits[0].argmax()))
        logits = model.forward(Rows.of([(0, position, [ids[-1]])]), state, [0])
    assert np.isfinite(logits).all() and all(0 <= token < SMOKE.vocab for token in ids)

"""Train the demo pack: a leg of some minutes on one card, then a checkpoint, then the next leg.

    python -m strata.bench.demo_pack.train --minutes 9 --total-minutes 25 --out CKPT [--resume CKPT] [--exact FOLDER]
        [--again] [--rate 4e-3] [--draft-rate 4e-3] [--round-from 0.7] [--chain-from 0.4] [--seed 1] [--tokens 65536]
        [--workers 12] [--device cuda] [--no-compile] [--smoke]

Schedule  follows the minutes that all legs of a course have spent, compiling included: warm-up, then a cosine to LAST
          of the rate; from SPARSE_FROM on attention keeps to the indexer's choice; from --round-from on the weights of
          the 4-bit file are rounded as it rounds them; from --chain-from on every second step teaches the draft layer
          its second and third proposals
Courses   --again begins another one where the checkpoint is: the schedule starts anew and ends at --total-minutes,
          attention is sparse and further proposals are learned from the start
Resuming  from --exact (a folder that stays on the machine): weights, moments and the next batch, exactly. From --resume
          (shards under 16 MiB): weights rounded to bfloat16, moments from zero, so the rate is warmed up once more; the
          schedule, the seed and the next batch are exact
Seeded    the first weights, the batches and the probes. Not reproducible to the bit: how far a minute comes depends on
          the machine, and sums of gradients on the card depend on their order
Log       --out/log.json: one page a leg, the losses by task every LOG_EVERY steps and what it is judged by at its end
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from strata.bench.demo_pack.checkpoint import Checkpoint
from strata.bench.demo_pack.config import SMOKE, Geometry
from strata.bench.demo_pack.data.mixture import TASKS
from strata.bench.demo_pack.data.stream import Batch, MixedStream
from strata.bench.demo_pack.feed import Feed, Source
from strata.bench.demo_pack.model import CHAIN_ROWS, DemoModel, Output, rows_of
from strata.bench.demo_pack.objective import Judged, Losses, Objective, Tokens, ahead, judge
from strata.bench.demo_pack.optim import Clip, Muon

LENGTHS = ((1024, 0.7), (4608, 0.3))
"""Two lengths only: each is compiled on its own."""
SMOKE_LENGTHS = ((256, 1.0),)
RATE = 4e-3
WEIGHT_DECAY = 0.03
WARM_STEPS = 150
LAST = 0.02
SPARSE_FROM = 0.35
ROUND_FROM = 0.7
CHAIN_FROM = 0.4
PROBES = 64
LOG_EVERY = 50
JUDGED_BATCHES = 4
CHAIN_EVERY = 2
"""Of so many steps one learns the second and the third draft, which is a fifth more work (counted at 1,024 and 4,608
tokens)."""
RESERVE_S = 8.0
"""Of a leg, for judging and the first saving; what --exact keeps is written after it."""
EXACT = "exact.pt"
COMPILED_KINDS = 64
"""Kinds of arguments that one function may be compiled for; there are few: two lengths, dense and sparse."""
ADAM = ("ssm_alpha", "ssm_beta", "inject", "conv1d", "ffn_gate_inp")
"""Beside all vectors AdamW has these narrow matrices,"""
ADAM_ENDS = ("token_embd", "output.", "per_layer_token_embd")
"""and the tables that tokens are looked up in."""


def rate_at(progress: float, warm_step: int) -> float:
    """The share of RATE at this share of the minutes, `warm_step` steps after a beginning without moments."""
    cosine = LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return cosine * min(1.0, (warm_step + 1) / WARM_STEPS)


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Each in two groups, the model's and the draft layer's, which may have a rate of its own."""
    matrices: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    of_draft = model.geometry.draft_shapes()
    for draft in (False, True):
        own = {name: p for name, p in model.tensors().items() if (name in of_draft) == draft}
        narrow = {
            name for name, p in own.items() if p.ndim < 2 or name.startswith(ADAM_ENDS) or any(w in name for w in ADAM)
        }
        matrices.append({"params": [p for name, p in own.items() if name not in narrow], "draft": draft})
        decayed = [own[name] for name in own if name in narrow and own[name].ndim > 1]
        plain = [own[name] for name in own if name in narrow and own[name].ndim < 2]
        others.append({"params": decayed, "weight_decay": WEIGHT_DECAY, "draft": draft})
        others.append({"params": plain, "weight_decay": 0.0, "draft": draft})
    fused = next(iter(model.tensors().values())).is_cuda
    adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), eps=1e-10, fused=fused)
    return [Muon(matrices, RATE, weight_decay=WEIGHT_DECAY), adam]


class Training:
    """Model, optimisers and where they are. `seconds`: spent by all legs; `course`: of these before the present course;
    `step`: also the index of the next batch."""

    def __init__(
        self,
        geometry: Geometry,
        seed: int,
        device: str,
        compiled: Callable[[Any], Any],
        rate: float = RATE,
        round_from: float = ROUND_FROM,
        draft_rate: float | None = None,
        chain_from: float = CHAIN_FROM,
    ) -> None:
        self.geometry, self.seed, self.device, self.rate = geometry, seed, torch.device(device), rate
        self.draft_rate = rate if draft_rate is None else draft_rate
        self.round_from, self.chain_from = round_from, chain_from
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = DemoModel(geometry, seed, compiled).to(self.device)
        self.objective = Objective(compiled)
        self.optimizers = optimizers(self.model)
        self.probes = torch.Generator(self.device).manual_seed(seed)
        self.clip = Clip(self.device)
        self.step, self.seconds, self.course, self.tokens, self.warm_step = 0, 0.0, 0.0, 0, 0
        self.pages: list[dict[str, Any]] = []

    def load(self, checkpoint: Checkpoint) -> None:
        """Weights and place from a checkpoint; moments begin at zero."""
        with torch.no_grad():
            for name, p in self.model.tensors().items():
                p.copy_(torch.from_numpy(checkpoint.weights[name].copy()))
        self._place(checkpoint.state)

    def load_exact(self, path: Path) -> None:
        """Everything as save_exact wrote it. Raises ValueError for weights or moments that are no numbers."""
        held = torch.load(path, map_location="cpu", weights_only=True)
        moments = [x for state in held["optimizers"] for of in state["state"].values() for x in of.values()]
        if not all(bool(x.isfinite().all()) for x in (*held["model"].values(), *moments)):
            raise ValueError(f"{path} holds weights or moments that are no numbers: go on from --resume")
        self.model.load_state_dict(held["model"])
        for optimizer, state in zip(self.optimizers, held["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._place(held["state"])
        self.probes.set_state(held["probes"])
        self.clip.usual.copy_(held["usual"])
        self.warm_step = held["warm_step"]

    def _place(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the checkpoint was trained with --seed {state['seed']}, not {self.seed}")
        self.step, self.seconds, self.tokens, self.pages = (state[k] for k in ("step", "seconds", "tokens", "pages"))
        self.course = state.get("course", 0.0)

    def state(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("seed", "step", "seconds", "course", "tokens", "pages")}

    def checkpoint(self) -> Checkpoint:
        weights = {name: p.detach().float().cpu().numpy() for name, p in self.model.tensors().items()}
        return Checkpoint(self.geometry, weights, self.state())

    def save_exact(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        held = {"model": self.model.state_dict(), "optimizers": optimizers, "probes": self.probes.get_state()}
        more = {"state": self.state(), "warm_step": self.warm_step, "usual": self.clip.usual}
        torch.save(held | more, path)

    def on_device(self, batch: Batch) -> Tokens:
        task = torch.from_numpy(batch.task).long().clamp_max(len(TASKS))
        arrays = (
            torch.from_numpy(batch.ids).long(),
            torch.from_numpy(batch.mask),
            torch.from_numpy(batch.segment),
            task,
        )
        if self.device.type == "cuda":
            return Tokens(*(x.pin_memory().to(self.device, non_blocking=True) for x in arrays))
        return Tokens(*arrays)

    def forward(self, tokens: Tokens, progress: float, chain: int | None = None) -> Output:
        rows = rows_of(tokens.segment, self.geometry, PROBES, self.probes, ahead(tokens.mask, 1, False))
        sparse, rounded = progress >= SPARSE_FROM or self.course > 0, progress >= self.round_from
        out: Output = self.model(tokens.ids, rows, sparse=sparse, dtype=self.dtype, rounded=rounded, chain=chain)
        return out

    def learn(self, batch: Batch, progress: float) -> Losses:
        """One step. Asks for nothing that would make the host wait for the card."""
        share = rate_at(progress, self.warm_step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * (self.draft_rate if group["draft"] else self.rate)
        tokens = self.on_device(batch)
        out = self.forward(tokens, progress, self.chain(progress))
        losses = self.objective(out, tokens)
        losses.total.backward()
        self.clip(list(self.model.parameters()))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.warm_step += 1
        self.tokens += batch.ids.size
        return Losses(*(x.detach() for x in losses))

    def chain(self, progress: float) -> int | None:
        """The first row of this step that makes a second proposal; None when the step learns no further ones."""
        turn, other = divmod(self.step, CHAIN_EVERY)
        return turn % CHAIN_ROWS if not other and (progress >= self.chain_from or self.course > 0) else None

    def judged(self, batches: Iterable[Batch], progress: float) -> dict[str, Any]:
        """Judged.page over these batches together, by the functions as they are compiled for learning."""
        total: Judged | None = None
        for i, batch in enumerate(batches):
            tokens = self.on_device(batch)
            one = judge(self.forward(tokens, progress, chain=i % CHAIN_ROWS).detach(), tokens)
            total = one if total is None else Judged(*(a + b for a, b in zip(total, one, strict=True)))
        return {} if total is None else total.page()


class Clock:
    """Where a leg is. `seconds`: of it, `total` of all legs, `before` those of the legs before, `course` those of the
    courses before."""

    def __init__(self, before: float, seconds: float, total: float, course: float = 0.0) -> None:
        self.before, self.total, self.course, self.begun = before, total, course, time.monotonic()
        self.end = min(seconds, total - before)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    @property
    def progress(self) -> float:
        return (self.before + self.spent - self.course) / (self.total - self.course)


def leg(training: Training, feed: Iterator[Batch], clock: Clock, n_steps: int | None, log: Log) -> None:
    """Steps until the clock's end, less RESERVE_S, or `n_steps`."""
    until = None if n_steps is None else training.step + n_steps
    while training.step != until and clock.spent < clock.end - (RESERVE_S if n_steps is None else 0):
        losses = training.learn(next(feed), clock.progress)
        log.add(losses)
        if training.step % LOG_EVERY == 0 or training.step == until:
            log.line(training, clock)
    training.seconds = clock.before + clock.spent


class Diverged(Exception):
    """A loss that is no number: nothing is saved."""


class Log:
    """Sums since the last line, kept on the device, and the lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._sums: Losses | None = None
        self._n: torch.Tensor | int = 0
        self._at = (time.monotonic(), 0)

    def add(self, losses: Losses) -> None:
        """A step's; one that is no number is counted and left out."""
        finite = torch.isfinite(losses.total)
        kept = Losses(*(torch.where(finite, x, torch.zeros_like(x)) for x in losses))
        self._sums = kept if self._sums is None else Losses(*(a + b for a, b in zip(self._sums, kept, strict=True)))
        self._n = finite.long() + self._n

    def line(self, training: Training, clock: Clock) -> None:
        """Prints and keeps a line; waits for the device. Raises Diverged when no step since the last had a loss."""
        if self._sums is None:
            return
        sums, count, tokens = [x.cpu() for x in self._sums], int(self._n), training.tokens
        (seconds, before), now = self._at, time.monotonic()
        if not count:
            raise Diverged(f"no loss is a number in the steps before {training.step}; try a lower --rate")
        figures = {name: float(x) / count for name, x in zip(Losses._fields[:-2], sums, strict=False)}
        (deep, n_deep), (of, n) = sums[-2:]
        figures |= {name: float(deep[i] / n_deep[i]) for i, name in enumerate(("second", "third")) if n_deep[i]}
        by_task = {task: round(float(of[i] / n[i]), 4) for i, task in enumerate(TASKS) if n[i]}
        line = {
            "step": training.step,
            "seconds": round(clock.before + clock.spent, 1),
            "progress": round(clock.progress, 4),
            "skipped": int(training.clip.bad),
            "norm": round(float(training.clip.usual), 4),
        }
        line |= {name: round(x, 4) for name, x in figures.items()}
        speed = (tokens - before) / (now - seconds) if before else 0.0
        self.lines.append({**line, "tokens_per_s": round(speed), "by_task": by_task})
        text = " ".join(f"{name} {x:.3f}" for name, x in figures.items())
        print(f"{line['step']:6d} {line['progress']:6.1%} {speed:9,.0f} tokens/s  {text}", flush=True)
        print("       " + " ".join(f"{task} {x:.3f}" for task, x in by_task.items()), flush=True)
        self._sums, self._n, self._at = None, 0, (now, tokens)


def parse(words: list[str] | None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--minutes", type=float, default=9.0, help="of this leg, compiling, judging and saving included"
    )
    arguments.add_argument("--total-minutes", type=float, default=25.0, help="of all legs: the schedule's length")
    arguments.add_argument("--steps", type=int, help="end the leg after so many steps")
    arguments.add_argument("--out", type=Path, required=True, help="folder of the checkpoint that this leg writes")
    arguments.add_argument("--resume", type=Path, help="folder of a checkpoint to go on from")
    arguments.add_argument(
        "--exact", type=Path, help="folder for exact resuming; used before --resume when it holds a leg"
    )
    arguments.add_argument("--again", action="store_true", help="begin another course with this leg")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--rate", type=float, default=RATE, help="learning rate after the warm-up")
    arguments.add_argument("--draft-rate", type=float, help="the draft layer's (default: as --rate)")
    arguments.add_argument(
        "--round-from",
        type=float,
        default=ROUND_FROM,
        help="share of the course from which weights are rounded to 4 bits",
    )
    arguments.add_argument(
        "--chain-from",
        type=float,
        default=CHAIN_FROM,
        help="share of the course from which second and third drafts are learned (--again: from its start)",
    )
    arguments.add_argument("--tokens", type=int, default=65_536, help="of a step")
    arguments.add_argument("--workers", type=int, default=12, help="processes that make batches; 0: none")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--no-compile", action="store_true", help="slower by a factor of several, without compiling")
    arguments.add_argument("--smoke", action="store_true", help="two small layers and short rows, for a test")
    return arguments.parse_args(words)


def begin(given: argparse.Namespace) -> Training:
    """The training to go on with, on its device."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = COMPILED_KINDS
    compiled = (lambda f: f) if given.no_compile else partial(torch.compile, dynamic=False)
    geometry = SMOKE if given.smoke else Geometry()
    rates = (given.rate, given.round_from, given.draft_rate, given.chain_from)
    training = Training(geometry, given.seed, given.device, compiled, *rates)
    if given.exact and (given.exact / EXACT).exists():
        training.load_exact(given.exact / EXACT)
    elif given.resume:
        training.load(Checkpoint.load(given.resume))
    if given.again:
        training.course = training.seconds
    spent, total = training.seconds / 60, given.total_minutes
    if spent >= total:
        raise ValueError(f"the legs before took {spent:.1f} minutes, --total-minutes {total:g} leaves none")
    return training


def place(given: argparse.Namespace) -> int:
    """The index of the next batch, known before anything touches the device: the workers are forked first."""
    if given.exact and (given.exact / EXACT).exists():
        return int((given.exact / "step").read_text())
    return int(Checkpoint.load(given.resume).state["step"]) if given.resume else 0


def main(words: list[str] | None = None) -> None:
    given = parse(words)
    begun = time.monotonic()
    lengths = SMOKE_LENGTHS if given.smoke else LENGTHS
    geometry = SMOKE if given.smoke else Geometry()
    source: Source = MixedStream(given.tokens, given.seed, lengths=lengths).batch
    held_out: Source = MixedStream(given.tokens, given.seed, lengths=lengths, split="test").batch
    cut = (geometry.block, geometry.ngram_eos)
    with (
        Feed(source, *cut, place(given), given.workers) as feed,
        Feed(held_out, *cut, 0, min(given.workers, JUDGED_BATCHES)) as tests,
    ):
        training = begin(given)
        clock = Clock(training.seconds, 60 * given.minutes, 60 * given.total_minutes, training.course)
        clock.begun = begun
        log = Log()
        leg(training, feed, clock, given.steps, log)
        training.checkpoint().save(given.out)  # before anything else can fail
        judged = training.judged(islice(tests, JUDGED_BATCHES), clock.progress)
    for task, figures in judged.items():
        print(f"  {task:12s} " + " ".join(f"{name} {x:.3g}" for name, x in figures.items()))
    training.seconds = clock.before + clock.spent
    training.pages.append({"lines": log.lines, "judged": judged, "seconds": round(clock.spent, 1), **machine(training)})
    if given.exact:
        training.save_exact(given.exact / EXACT)
        (given.exact / "step").write_text(str(training.step))
    training.checkpoint().save(given.out)
    (given.out / "log.json").write_text(json.dumps(training.pages, indent=1) + "\n", encoding="utf-8")
    print(f"{training.step} steps, {training.tokens:,} tokens, {training.seconds:.0f} s: {given.out}")


def machine(training: Training) -> dict[str, Any]:
    """What the leg ran on and what it took."""
    facts: dict[str, Any] = {"torch": str(torch.__version__), "tokens": training.tokens, "steps": training.step}
    if training.device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / (1 << 30), 1)
    return facts


if __name__ == "__main__":
    main()

"""Which conversations there are and how often: one draw is one conversation of a split.

Kinds     of any length (`SIZED`: they follow the size that is asked for) and of their own length (`SHORT`)
Around    some conversations have a system message, some begin with other short exchanges, whose thinking is hidden
          from then on as a server hides it
"""

from __future__ import annotations

from random import Random

from strata.bench.demo_pack.data.about import about
from strata.bench.demo_pack.data.arithmetic import arithmetic, chain, larger
from strata.bench.demo_pack.data.lists import copy, count, sort
from strata.bench.demo_pack.data.lookup import lookup, needle
from strata.bench.demo_pack.data.prose import story
from strata.bench.demo_pack.data.records import as_json
from strata.bench.demo_pack.data.sample import Generator, Sample, Split, split_of
from strata.bench.demo_pack.data.small_talk import small_talk
from strata.bench.demo_pack.data.tools import tool_call, tool_result, tool_unused

Weighted = dict[str, tuple[Generator, float]]

SHORT: Weighted = {
    "arithmetic": (arithmetic, 32), "larger": (larger, 8), "chain": (chain, 4), "sort": (sort, 10),
    "count": (count, 10), "tools": (tool_call, 16), "results": (tool_result, 5), "no_tool": (tool_unused, 3),
    "story": (story, 4), "about": (about, 7), "talk": (small_talk, 6),
}  # fmt: skip
SIZED: Weighted = {"lookup": (lookup, 58), "needle": (needle, 12), "copy": (copy, 15), "json": (as_json, 15)}
LONG: Weighted = {"lookup": (lookup, 80), "needle": (needle, 20)}
GENERATORS: dict[str, Generator] = {name: make for name, (make, _) in (SHORT | SIZED).items()}
TASKS = tuple(GENERATORS)

SCORED = (
    "arithmetic", "larger", "chain", "lookup", "needle", "copy", "sort", "count", "json", "tools", "results", "about",
)  # fmt: skip
"""Tasks whose answers can be checked."""

LONG_TOKENS = 900
"""From this size on a conversation is of a kind in LONG."""
SIZED_SHARE = 0.4
MAX_TRIES = 10_000

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are Strata's demo model.", "Answer briefly.",
    "You are a friendly assistant. Answer in English.", "You are an assistant that gives exact answers.", "Be precise.",
    "You are a helpful AI assistant.",
)  # fmt: skip


def draw_task(rng: Random, task: str, split: Split, size: int) -> Sample:
    """A sample of one task, of about `size` tokens where the task has a length. A problem of the other split is drawn
    again."""
    for _ in range(MAX_TRIES):
        sample = GENERATORS[task](rng, size)
        if split_of(sample.key) == split:
            return sample
    raise RuntimeError(f"{task}: no problem of the split {split!r} in {MAX_TRIES} draws")


def _pick(rng: Random, kinds: Weighted) -> str:
    return rng.choices(list(kinds), [weight for _, weight in kinds.values()])[0]


def draw(rng: Random, split: Split, size: int) -> Sample:
    """A conversation of any task. `size` in tokens: a wish, which only tasks with a length follow."""
    if size >= LONG_TOKENS:
        return _with_system(rng, draw_task(rng, _pick(rng, LONG), split, size))
    sample = draw_task(rng, _pick(rng, SIZED if rng.random() < SIZED_SHARE else SHORT), split, size)
    if rng.random() < 0.15:
        sample = _after_others(rng, sample, split)
    return _with_system(rng, sample)


def _with_system(rng: Random, sample: Sample) -> Sample:
    if rng.random() < 0.75:
        return sample
    return _prefixed(sample, [{"role": "system", "content": rng.choice(SYSTEM)}])


def _after_others(rng: Random, sample: Sample, split: Split) -> Sample:
    """One or two short exchanges about something else come first, with thinking as in this one."""
    before = []
    for _ in range(rng.choice((1, 1, 2))):
        other = draw_task(rng, rng.choice(("arithmetic", "talk", "about", "count", "sort")), split, 100)
        if other.thinking is sample.thinking:
            before += other.messages
    return _prefixed(sample, before)


def _prefixed(sample: Sample, before: list[dict[str, object]]) -> Sample:
    return Sample(sample.task, sample.key, [*before, *sample.messages], sample.wants, sample.tools, sample.thinking)

"""Strategies for every line of the protocol: values that it allows, so that decoding gives back what was encoded."""

from array import array
from typing import get_args

import pytest
from hypothesis import strategies as st

from strata.protocol import lines

UINT32 = st.integers(0, 2**31 - 1)
COUNT = st.integers(0, 2**63 - 1)
TENTHS = st.integers(-(10**12), 10**12).map(lambda n: round(n / 10, 1))
UNIT = st.floats(0, 1)
FINITE = st.floats(-1e6, 1e6, allow_nan=False)
IDS = st.lists(UINT32, min_size=1, max_size=40).map(lambda ids: array("i", ids))
NAME = st.from_regex(r"[a-z0-9_]{1,12}", fullmatch=True)
VISIBLE = st.characters(blacklist_categories=("Cc", "Cs", "Z"), blacklist_characters="=")
WORD = st.text(VISIBLE, min_size=1, max_size=20)
TEXT = st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=60).map(lambda text: text.strip(" "))
PATH = TEXT.filter(bool)
MAX_NEW = st.integers(1, 2**31 - 1)


def optional(strategy):
    return st.none() | strategy


KEYS = st.builds(
    lines.SamplingKeys,
    temperature=FINITE,
    top_k=st.integers(-5, 200),
    top_p=st.floats(0, 2, exclude_min=True),
    min_p=st.floats(-1, 2),
    penalty_last_n=st.integers(-5, 10_000),
    penalty_repeat=st.floats(0, 100, exclude_min=True),
    penalty_freq=FINITE,
    penalty_present=FINITE,
    seed=st.integers(0, 2**64 - 1),
    cvec=st.booleans(),
    ckpt=st.booleans(),
    pin=optional(UINT32),
    pcie_frac=optional(UNIT),
    spec_min_p=optional(st.floats(-1, 2)),
)

COMMANDS = {
    lines.Gen: st.builds(lines.Gen, MAX_NEW, IDS, KEYS),
    lines.GenI: st.builds(lines.GenI, MAX_NEW, WORD, IDS, KEYS),
    lines.BGen: st.builds(lines.BGen, UINT32, MAX_NEW, IDS, KEYS),
    lines.BGenI: st.builds(lines.BGenI, UINT32, MAX_NEW, WORD, IDS, KEYS),
    lines.Stop: st.just(lines.Stop()),
    lines.BStop: st.builds(lines.BStop, UINT32),
    lines.BYield: st.builds(lines.BYield, UINT32),
    lines.VramCommand: st.builds(lines.VramCommand, optional(UINT32)),
    lines.Save: st.builds(lines.Save, PATH),
    lines.Restore: st.builds(lines.Restore, PATH),
    lines.Quit: st.just(lines.Quit()),
}

INT_VALUES = st.dictionaries(NAME, st.integers(-(10**18), 10**18), max_size=8)
INFO_FLOATS = st.fixed_dictionaries({}, optional={"pcie_frac": st.integers(0, 100).map(lambda n: n / 100)})
INFO_TEXTS = st.fixed_dictionaries({}, optional={"engine": WORD, "cvec": st.sampled_from(["0", "project:4-44"])})
RESERVED = {"engine", "cvec", "kv", "pcie_frac", "spec_min_p", "conversation_cache_similarity"}


def merged(*parts):
    ints, *rest = parts
    values = {name: value for name, value in ints.items() if name not in RESERVED}
    for part in rest:
        values |= part
    return values


OUTPUTS = {
    lines.Info: st.builds(merged, INT_VALUES, INFO_FLOATS, INFO_TEXTS).map(lines.Info),
    lines.Ready: st.builds(lines.Ready, COUNT, st.lists(NAME, max_size=3).map(tuple)),
    lines.Resume: st.builds(lines.Resume, COUNT),
    lines.Progress: st.builds(lines.Progress, COUNT, COUNT, TENTHS, TENTHS),
    lines.Reused: st.builds(lines.Reused, COUNT),
    lines.Token: st.builds(lines.Token, UINT32),
    lines.Yielded: st.builds(lines.Yielded, UINT32, COUNT),
    lines.Done: st.builds(
        lines.Done,
        *(COUNT, COUNT, TENTHS, TENTHS, st.sampled_from(get_args(lines.Finish))),
        *(COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, TENTHS, COUNT, COUNT),
        optional(st.builds(lines.ChainCounts, COUNT, COUNT, COUNT, COUNT, COUNT)),
    ),
    lines.Admitted: st.builds(lines.Admitted, UINT32, st.booleans()),
    lines.SlotToken: st.builds(lines.SlotToken, UINT32, UINT32),
    lines.SlotDone: st.builds(
        lambda slot, generated, finish, ms, drafts: lines.SlotDone(slot, generated, finish, ms, *drafts),
        *(UINT32, COUNT, st.sampled_from(get_args(lines.SlotFinish)), TENTHS),
        st.just(()) | st.tuples(COUNT, COUNT),
    ),
    lines.Err: st.builds(lines.Err, TEXT),
    lines.VramReport: st.builds(
        lines.VramReport,
        *[optional(COUNT)] * 7,
        st.dictionaries(NAME.map("x_".__add__), st.integers(-(10**18), 10**18), max_size=3),
    ),
    lines.Saved: st.builds(lines.Saved, COUNT, COUNT, TENTHS),
    lines.Restored: st.builds(lines.Restored, COUNT, COUNT, TENTHS),
    lines.SessionProgress: st.builds(lines.SessionProgress, COUNT, COUNT),
    lines.SessionWait: st.builds(lines.SessionWait, NAME, st.integers(0, 3600)),
    lines.SessionError: st.builds(
        lines.SessionError, st.sampled_from(["invalid", "storage", "memory", "io"]), st.booleans(), TEXT
    ),
    lines.Fatal: st.builds(lines.Fatal, TEXT),
    lines.Unknown: st.builds(
        lines.Unknown,
        st.from_regex(r"[A-Z]{1,10}", fullmatch=True).filter(
            lambda word: word not in {getattr(kind, "word", None) for kind in get_args(lines.Output)}
        ),
        TEXT,
    ),
}


@pytest.fixture(params=list(COMMANDS), ids=lambda kind: kind.__name__)
def commands(request):
    return COMMANDS[request.param]


@pytest.fixture(params=list(OUTPUTS), ids=lambda kind: kind.__name__)
def outputs(request):
    return OUTPUTS[request.param]


@pytest.fixture
def strategies():
    """kind -> strategy, for commands and for outputs."""
    return COMMANDS, OUTPUTS

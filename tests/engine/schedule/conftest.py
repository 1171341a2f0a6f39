"""A scripted model with a draft layer, for schedules with drafts."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.draft.accept import n_kept
from strata.engine.schedule.ports import Row

FAST = 1.0
"""Milliseconds of a window."""


@pytest.fixture
def drafting_model(scripted):
    """drafting_model(clock, hits, ..): a scripted model with a draft layer that proposes right or wrong tokens in turn.

    hits: of every len(hits) proposals, those that are right · row_ms: what a row of a verify window takes
    """

    class DraftingModel(scripted):
        def __init__(self, clock, hits=(True,), layer=True, row_ms=0.1, end=(3,), **given):
            super().__init__(**given)
            self.clock, self.hits, self.layer, self.row_ms = clock, hits, layer, row_ms
            self.end = set(end)
            self.fed: list[int] = []
            self.proposed = 0
            self.bars: set[float] = set()

        def window(self, rows, again, rounds=0):
            self.clock.ms += FAST
            return super().window(rows, again)

        def follows(self, slot: int) -> bool:
            return self.layer

        def propose(self, row: Row, most: int, min_p: float) -> list[int]:
            self.bars.add(min_p)
            found, tokens = [], row.tokens.tolist()
            for _ in range(most):
                right = self.says(row, tokens)
                hit = self.hits[self.proposed % len(self.hits)]
                self.proposed += 1
                found.append(right if hit else (right + 1) % self.vocab)
                tokens.append(found[-1])
            return found

        def says(self, row: Row, tokens: list[int]) -> int:
            seed = hash(tuple(tokens)) % 2**32
            logits = np.random.default_rng(seed).normal(size=self.vocab).astype(np.float32)
            recent = np.array(tokens[max(0, len(tokens) - row.last_n) :], np.int32)
            return self.sample(logits, recent, row.how, len(tokens))

        def verify(self, rows):
            assert sum(1 + len(row.drafts) for row in rows) <= 8
            self.windows.append([row.slot for row in rows])
            said = []
            for row in rows:
                assert not set(row.drafts) & self.end, "an end token was drafted"
                self.clock.ms += self.row_ms * (1 + len(row.drafts))
                held = self.state.tokens[row.slot]
                assert held == row.tokens[:-1].tolist()
                tokens, ids = row.tokens.tolist(), []
                for draft in (*row.drafts, None):
                    ids.append(self.says(row, tokens))
                    tokens.append(draft)
                n = n_kept(row.drafts, ids)
                held += [int(row.tokens[-1]), *ids[: n - 1]]
                self.fed.append(1 + len(row.drafts))
                said.append(ids[:n])
            self.clock.ms += FAST
            return said

    return DraftingModel

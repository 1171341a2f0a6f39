"""Rounds on the solo path: what comes next is decided, and started, before what runs now is known.

Rounds feed themselves (`Runner.round`), so nothing waits for the host: windows go over into rounds and back without a
pause. What follows is decided a window early, by what is known then: how many drafts pay, whether drafts do at all, and
that whatever the round under way gives, the next one still fits what the request may say. Where many tokens agree with
what the text said before, its own words are the drafts, unless rounds were measured to have more tokens in the time: a
window from the host verifies them, and as long as the text goes on like this the next one is started at once.

A request begins with one draft a round until one has been kept: a round is decided about before any draft is known, and
many answers are over by then. That it begins by waiting for the host is no fault of its drafts, and not counted.

Units    milliseconds of the given clock
Effects  computing goes through the `Runner`; how long it took decides how it goes on (`draft.policy`, `draft.reach`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np

from strata.engine.draft.accept import before_end
from strata.engine.draft.counts import DraftCounts
from strata.engine.draft.policy import Payoff
from strata.engine.draft.reach import Reach
from strata.engine.draft.suffix import LONGEST, suffix_draft
from strata.engine.flags import WINDOW_ROWS
from strata.engine.log import log
from strata.engine.schedule.ports import DraftRules, Row, Runner

SHORT: Final = 4
"""Tokens that may still come below which no round is started behind a window without drafts."""

WORTH: Final = 0.9
"""Of a token's time in rounds, what one may take from the text's own words: to leave rounds and to come back costs a
pause each."""


class RoundDrafting:
    """Of one request. `counts`: what becomes of its drafts."""

    def __init__(
        self,
        runner: Runner,
        rules: DraftRules,
        end_ids: Collection[int],
        clock: Callable[[], float],
        payoff: Payoff,
        reach: Reach,
        text: Reach,
        counts: DraftCounts,
    ) -> None:
        self.reach = reach
        self._text = text
        self._runner = runner
        self._rules = rules
        self._end_ids = end_ids
        self._clock = clock
        self._payoff = payoff
        self._counts = counts
        self._window = False  # one without drafts has been started
        self._drafts: int | None = None  # a round with so many has been
        self._asked: int | None = None  # so many were wanted
        self._words: tuple[int, ...] | None = None  # a window has been that verifies these of the text
        self._first = True  # what runs is the request's first
        self._kept = False  # a draft has been
        self._at = 0.0  # since then, by the clock

    def window(self, row: Row, n_left: int) -> list[int]:
        """The next tokens, at most n_left >= 1, of a row that has rounds."""
        ahead = self._window or self._drafts is not None or self._words is not None
        begun = self._at if ahead else self._clock()
        words = self._words
        if words is None:
            # The first window waits for the host: a long prompt is looked through while it runs.
            words = () if self._payoff.off or self._first else self._repeated(row, n_left)
        if self._drafts is None and (self._window or n_left < 2 or not self._payoff.wants(1)):
            said = self._plain(row, n_left, bool(words), begun)
        elif self._drafts is None and words:
            said = self._of_text(row, words, n_left, begun)
        else:
            said = self._round(row, n_left, bool(words), begun)
        self._first = False
        return said

    def _plain(self, row: Row, n_left: int, repeats: bool, begun: float) -> list[int]:
        """A window without drafts. Behind it comes another one, or a round that has none yet."""
        steady, wants = self._window, self._payoff.follows(1, self._window)
        again, most = n_left > 1 and not (wants and repeats), self._most(row)
        rounds = self._want(most) if again and wants and n_left >= SHORT else 0
        said = self._runner.window([row], again, rounds)
        self._window, self._drafts = again and not rounds, 0 if rounds else None
        self._at = self._clock()
        self._payoff.plain(1, self._at - begun, 1, steady)
        return said

    def _of_text(self, row: Row, words: tuple[int, ...], n_left: int, begun: float) -> list[int]:
        """A window that verifies what the text has. Where the text still repeats itself behind it, the next one does so
        too, and runs while these tokens are told."""
        (said,) = self._runner.verify([row._replace(drafts=words)])
        ms = self._clock() - begun
        self._counts.add(len(words), len(said) - 1, 0)
        self._text.saw(len(words), len(said) - 1, len(words))
        self._text.timed(len(words), ms)
        self._drafted(ms, len(said))
        self._words, n_left = None, n_left - len(said)
        if n_left > 1 and said[-1] not in self._end_ids and self._payoff.wants(1):
            following = row._replace(tokens=np.append(row.tokens, np.array(said, np.int32)))
            if words := self._repeated(following, n_left):
                self._words = words
                self._runner.verify_ahead(following._replace(drafts=words))
        self._at = self._clock()
        return said

    def _repeated(self, row: Row, n_left: int) -> tuple[int, ...]:
        """What the text has behind a row, where so many tokens agree that it is worth leaving rounds for."""
        found = suffix_draft(row.tokens, min(self._rules.suffix, n_left - 1, WINDOW_ROWS - 1))
        if found.agreed < LONGEST or not self._text_pays(len(found.tokens), self._most(row)):
            return ()
        return before_end(found.tokens, self._end_ids)

    def _text_pays(self, n: int, most: int) -> bool:
        """Whether n drafts from the text are worth leaving rounds for, of up to `most` drafts. What was not measured is
        tried."""
        of_text, of_rounds = self._text.ms_of(n), self.reach.best_ms(most)
        return of_text is None or of_rounds is None or of_text < WORTH * of_rounds

    def _round(self, row: Row, n_left: int, repeats: bool, begun: float) -> list[int]:
        most, steady = self._most(row), self._drafts is not None
        fed = self._drafts
        if fed is None:
            wanted = min(self._want(most), n_left - 1)
            row = row._replace(drafts=before_end(self._runner.propose(row, wanted, 0.0), self._end_ids))
            fed = max(1, len(row.drafts))  # behind a prompt it may find one
        after = None if repeats else self._after(most, n_left - 1 - fed)
        said, drafts, self._drafts = self._runner.round(row, after)
        self._window = after == 0
        self._at = self._clock()
        ms = self._at - begun
        if drafts:
            self._counts.add(drafts, len(said) - 1, drafts)
            self.reach.saw(drafts, len(said) - 1, most)
            self._kept = self._kept or len(said) > 1
        if steady and drafts in (0, self._asked):  # others leave more drafts than they have
            self.reach.timed(drafts, ms)
        self._asked = after
        self._drafted(ms, len(said))
        return said

    def _want(self, most: int) -> int:
        """How many drafts a round of up to `most` should have."""
        return self.reach.want(most) if self._kept else min(1, most)

    def _after(self, most: int, n_left: int) -> int | None:
        """What comes behind a round that leaves n_left tokens at least: drafts of the next one, 0 a window without."""
        if n_left < 1:
            return None
        return min(self._want(most), n_left - 1) if self._payoff.goes_on() else 0

    def _most(self, row: Row) -> int:
        """Drafts of a round."""
        return min(self._runner.rounds(row), self._rules.spec - 1)

    def _drafted(self, ms: float, tokens: int) -> None:
        if self._first:  # it has waited for the host, as a window without drafts would have
            start = self.reach.start_ms()
            if start is None or tokens > 1:
                return
            ms = min(ms, start)
        if self._payoff.drafted(1, ms, tokens):
            log(self._payoff.verdict(1))

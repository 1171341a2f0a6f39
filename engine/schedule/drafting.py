"""Windows with drafts where they pay: one sequence on the solo path, or the slots together. Text never depends on it.

Solo     the draft layer proposes up to spec - 1 tokens, as many as pay (`draft.reach`); where the text itself has said
         the same before, its words come behind them, or instead of them when many tokens agree. At most MOST_DRAFTS a
         window
Rounds   where the runner has them for a sequence, they come instead of windows that wait for the host (`rounds`)
Slots    a draft for each slot; where the window has no room for the rows of all of them, they take turns
Ends     a draft never holds an end token, so what is kept behind a window is what the plain windows would have kept
Effects  computing goes through the `Runner`; how long it took decides whether it goes on like this (`draft.policy`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from strata.engine.draft.accept import before_end
from strata.engine.draft.counts import DraftCounts
from strata.engine.draft.policy import OUTLIER, Payoff, PlainTimes
from strata.engine.draft.reach import Reach, WindowTimes
from strata.engine.draft.suffix import LONGEST, Suffix, suffix_draft
from strata.engine.draft.worth import RowTimes
from strata.engine.flags import WINDOW_ROWS
from strata.engine.log import log
from strata.engine.schedule.ports import DraftRules, Row, Runner, pool_slot
from strata.engine.schedule.rounds import RoundDrafting
from strata.engine.schedule.slots import Decoding

MOST_DRAFTS: Final = WINDOW_ROWS - 1
BARLESS: Final = (
    "--spec-min-p and spec_min_p do nothing in rounds, where the card verifies all proposals that it has made: to "
    "leave some out would save no time there. They count in windows that wait for the host, as those with penalties do"
)
QUIET: Final = 16
"""Windows in a row for which the text had no draft; from then on the next one is started before the last is known."""


class Drafts:
    """Of one request on the solo path."""

    def __init__(
        self,
        payoff: Payoff,
        reach: Reach,
        min_p: float,
        rounds: Callable[[DraftCounts], RoundDrafting],
    ) -> None:
        self.payoff = payoff
        self.reach = reach
        self.min_p = min_p
        self.counts = DraftCounts()
        self.rounds = rounds(self.counts)
        self.quiet = 0  # windows in a row without a draft from the text
        self.ahead = False  # the next window has been started


class SoloDrafting:
    """Windows of the solo path."""

    def __init__(self, runner: Runner, rules: DraftRules, end_ids: Collection[int], clock: Callable[[], float]) -> None:
        self.times = PlainTimes()
        self._runner = runner
        self._rules = rules
        self._end_ids = end_ids
        self._clock = clock
        self._window_times = WindowTimes()
        self._round_times = WindowTimes()
        self._text_times = WindowTimes()  # of windows between rounds, whose drafts are from the text
        self._payoff = Payoff(self.times)
        self._drafts: Drafts | None = None
        self._told = False  # that a bar comes to nothing in rounds

    def begin(self, min_p: float | None = None) -> Drafts:
        """A request begins; min_p: its own bar."""
        self._payoff.next_request()
        before = self._drafts
        reach = Reach(self._window_times, None if before is None else before.reach)
        of_rounds = Reach(self._round_times, None if before is None else before.rounds.reach)
        common = self._runner, self._rules, self._end_ids, self._clock, self._payoff
        rounds = partial(RoundDrafting, *common, of_rounds, Reach(self._text_times))
        self._drafts = Drafts(self._payoff, reach, self._rules.min_p if min_p is None else min_p, rounds)
        return self._drafts

    def window(self, drafts: Drafts, row: Row, n_left: int) -> list[int]:
        """The next tokens of the sequence, at most n_left >= 1: feeds its newest one, and drafts."""
        rules = self._rules
        if rules.spec < 2:
            return self._runner.window([row], n_left > 1)
        if self._runner.rounds(row):
            if drafts.min_p > 0 and not self._told:
                self._told = True
                log(BARLESS)
            return drafts.rounds.window(row, n_left)
        begun = self._clock()
        if n_left < 2 or not drafts.payoff.wants(1):
            return self._plain(drafts, row, n_left > 1, begun)
        follows, most = self._runner.follows(row.slot), min(n_left - 1, MOST_DRAFTS)
        found = suffix_draft(row.tokens, min(rules.suffix, most))
        drafts.quiet = 0 if found.tokens else drafts.quiet + 1
        again = not follows and drafts.quiet >= QUIET
        if drafts.ahead:
            return self._plain(drafts, row, again, begun)
        of_layer_most = min(rules.spec - 1, most)
        offered, of_layer = self._offer(drafts, row, of_layer_most, follows, found)
        if not offered and not follows:
            return self._plain(drafts, row, again, begun)
        (said,) = self._runner.verify([row._replace(drafts=offered)])
        ms = self._clock() - begun
        if offered:
            drafts.counts.add(len(offered), len(said) - 1, of_layer)
        if of_layer:
            drafts.reach.saw(of_layer, min(len(said) - 1, of_layer), of_layer_most)
            if of_layer == len(offered):
                drafts.reach.timed(of_layer, ms)
        if drafts.payoff.drafted(1, ms, len(said)):
            log(drafts.payoff.verdict(1))
        return said

    def _plain(self, drafts: Drafts, row: Row, again: bool, begun: float) -> list[int]:
        said, steady = self._runner.window([row], again), drafts.ahead
        drafts.ahead = again
        drafts.payoff.plain(1, self._clock() - begun, 1, steady)
        return said

    def _offer(self, drafts: Drafts, row: Row, most: int, follows: bool, found: Suffix) -> tuple[tuple[int, ...], int]:
        """Drafts for a window, and how many of them the draft layer proposed: at most `most`. found: what the text
        has."""
        if found.agreed >= LONGEST or not follows:
            return before_end(found.tokens, self._end_ids), 0
        proposed = tuple(self._runner.propose(row, drafts.reach.want(most), drafts.min_p))
        agree = found.tokens[: len(proposed)] == proposed
        offered = before_end(found.tokens if agree else proposed, self._end_ids)
        return offered, min(len(proposed), len(offered))


class SlotDrafting:
    """Windows of the slots: `window` where drafts are wanted, and the times of those where they are not.

    What windows take is measured from the end of the one before: what the host does between two of them, it does while
    the card works only where the next one has been started.
    """

    def __init__(
        self,
        runner: Runner,
        rules: DraftRules,
        end_ids: Collection[int],
        times: PlainTimes,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._rules = rules
        self._end_ids = end_ids
        self._clock = clock
        self._times = times
        self._payoff = Payoff(times)
        self._kinds: set[tuple[int, int, bool]] = set()  # slots, drafts, penalties: of windows so far
        self._row_times = RowTimes()
        self._turn = 0
        self._at: float | None = None  # the end of the last window, when nothing else has come since

    def wants(self, n: int) -> bool:
        """Whether the next window of n slots has drafts. Where one without gives as many tokens as one with drafts can,
        none has."""
        return self._rules.slots and n < WINDOW_ROWS and self._payoff.wants(n)

    def interrupt(self) -> None:
        """Something else than a window comes, which takes its time."""
        self._at = None

    def begin(self) -> float:
        """When the window that comes now began."""
        return self._clock() if self._at is None else self._at

    def plain(self, n: int, begun: float, steady: bool) -> None:
        """A window without drafts gave a token to each of n slots."""
        if self._rules.slots:
            self._at = self._clock()
            self._payoff.plain(n, self._at - begun, n, steady)

    def window(self, rows: Sequence[Row], decoding: Sequence[Decoding]) -> list[tuple[Decoding, list[int]]]:
        """The next tokens of slots, each with a draft if there is one; of as many slots as the window has room for."""
        begun, n = self.begin(), len(decoding)
        chosen = self._choose(rows, decoding)
        said = self._runner.verify([row for _, row in chosen])
        for (one, row), tokens in zip(chosen, said, strict=True):
            if row.drafts:
                one.drafts.add(len(row.drafts), len(tokens) - 1, len(row.drafts))
                one.kept.saw(len(tokens) > 1)
        self._at = self._clock()
        self._judge(n, [row for _, row in chosen], self._at - begun, sum(map(len, said)))
        return [(one, tokens) for (one, _), tokens in zip(chosen, said, strict=True)]

    def _choose(self, rows: Sequence[Row], decoding: Sequence[Decoding]) -> list[tuple[Decoding, Row]]:
        """Slots of a window, whose turn it is, with their drafts."""
        chosen: list[tuple[Decoding, Row]] = []
        room, turn, n = WINDOW_ROWS, self._turn, len(decoding)
        bar = self._row_times.bar(n)
        for i in range(n):
            at = (turn + i) % n
            one, row = decoding[at], rows[at]
            drafts = before_end(self._propose(one, row, bar), self._end_ids)
            if 1 + len(drafts) > room:
                break
            room -= 1 + len(drafts)
            chosen.append((one, row._replace(drafts=drafts)))
        self._turn = (turn + len(chosen)) % n
        return chosen

    def _judge(self, n: int, rows: Sequence[Row], ms: float, tokens: int) -> None:
        """A window of n slots with these rows gave so many tokens. A first one of its kind that took very long has
        captured its graph: that says nothing of those that follow."""
        drafts = sum(len(row.drafts) for row in rows)
        kind = len(rows), drafts, any(map(_penalised, rows))
        first, plain = kind not in self._kinds, n * (self._times.of(n) or 0.0)
        self._kinds.add(kind)
        if first and ms > OUTLIER * plain:
            self._payoff.captured()
            return
        if n == len(rows):
            self._row_times.saw(n, drafts, ms, tokens)
        if self._payoff.drafted(n, ms, tokens):
            log(self._payoff.verdict(n))

    def _propose(self, one: Decoding, row: Row, bar: float) -> list[int]:
        """A draft of a slot, if it may say another token behind it, and so many of its drafts are kept."""
        if one.n_left < 2 or not self._runner.follows(pool_slot(one.slot)):
            return []
        found = self._runner.propose(row, 1, 0.0)
        return found if found and one.kept.wants(bar) else []


def _penalised(row: Row) -> bool:
    how = row.how
    return (how.penalty_repeat, how.penalty_freq, how.penalty_present) != (1.0, 0.0, 0.0)

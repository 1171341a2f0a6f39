"""Which sequences the draft layer follows, and where its own rows of them end. No arithmetic: lengths and pages.

The layer follows a slot of the model as long as that holds the same sequence; when another one is there, it begins
again with nothing. It may miss tokens (rows of windows without drafts, the last row of a chunk): it then goes on behind
a gap. So its positions count the rows that it has seen. Drafts may get worse by that; the text never depends on them.

Units    rows of the draft layer
Errors   ValueError for more rows than it can ever hold
"""

from __future__ import annotations

from strata.engine.state.slots import StatePool


class DraftBook:
    """model: the state whose slots are followed · state: of the draft layer, with as many slots or fewer."""

    def __init__(self, model: StatePool, state: StatePool) -> None:
        self.state = state
        self._model = model
        self._epochs: list[int | None] = [None] * state.n_slots

    @property
    def most(self) -> int:
        """Rows that a slot can hold."""
        return self.state.max_context

    def follows(self, slot: int) -> bool:
        """Whether the layer has a place for the slot."""
        return slot < self.state.n_slots

    def epoch(self, slot: int) -> int:
        """Which sequence the model holds there; a proposal for another one is void."""
        return self._model.epoch(slot)

    def held(self, slot: int) -> int:
        """Tokens that the model holds there."""
        return self._model.length(slot)

    def place(self, slot: int, n: int) -> int:
        """The position of the next of n rows, with room for all of them; 0 when it begins again."""
        if n > self.most:
            raise ValueError(f"the draft layer holds {self.most} rows, got {n}")
        if self._epochs[slot] != self._model.epoch(slot) or self.state.length(slot) + n > self.most:
            self.state.reset(slot)
            self._epochs[slot] = self._model.epoch(slot)
        self.state.reserve(slot, n)
        return self.state.length(slot)

    def fits(self, slot: int, n: int) -> bool:
        """Whether the layer goes on in this sequence for n rows more, without beginning again."""
        return self._epochs[slot] == self._model.epoch(slot) and self.state.length(slot) + n <= self.most

    def keep(self, slot: int, n: int) -> None:
        """n rows at the place are right."""
        self.state.advance(slot, n)

    def copied(self, source: int, target: int) -> None:
        """A slot of the model has become a copy of another one."""
        if max(source, target) >= self.state.n_slots or self._epochs[source] != self._model.epoch(source):
            return
        self.state.copy(source, target)
        self._epochs[target] = self._model.epoch(target)

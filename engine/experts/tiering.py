"""Whether a model fits a card whole, and if not, what is planned for its experts: the figures to plan from.

Errors   DeviceError in one line: no prompt fits, or RAM does not hold what must lie there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from strata.engine import flags
from strata.engine.device.arena import MIB
from strata.engine.device.meter import Meter
from strata.engine.experts.helpers import Card, HostExperts
from strata.engine.experts.placement import ExpertSize, Placement
from strata.engine.experts.plan import Asked, Model, TierPlan, plan_tiers
from strata.engine.experts.ring import BUFFERS, ring_bytes
from strata.engine.memory.card import RING, STREAM_MIN
from strata.engine.memory.figures import DoesNotFit
from strata.engine.memory.homes import CACHE_FIRST, STAGING
from strata.engine.memory.loan import LoanRoom
from strata.engine.memory.price import MIXER_ROWS, Price, prompt_shape
from strata.engine.memory.prompt import GRID, OWN_AUTO
from strata.engine.memory.sizes import EXPERTS
from strata.engine.pack import ModelSpec, Pack
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.formats import TensorType

LENT_RING: Final = 32
"""Experts of a ring beside a chunk that has the head's memory, at least: shorter rounds for a longer chunk."""
FREE_WHOLE: Final = 512 * MIB
"""VRAM that stays free beside a model that is there whole."""


class Tiering:
    """Experts of these sizes, a layer each, and how many of them are wanted in VRAM. types: of the pack's tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        types: Mapping[str, TensorType],
        sizes: Sequence[ExpertSize],
        asked: Asked,
        max_context: int,
        stream_min: int = STREAM_MIN,
        beside: Callable[[int], int] = lambda rows: 0,
    ) -> None:
        shape = prompt_shape(spec, types, max_context)
        self._whole, self._price = Price(shape), Price(shape, MIXER_ROWS)
        self._asked = asked
        floats = any(kind.is_float for name, kind in types.items() if name.endswith(EXPERTS))
        most = min(flags.MAX_CHUNK, max_context)
        streams = asked.stream_min or stream_min
        self._model = Model(
            tuple(sizes), spec.experts, self._price, most, floats, streams, beside, MIXER_ROWS, self._whole
        )

    @classmethod
    def of(
        cls,
        pack: Pack,
        meter: Meter,
        asked: Asked,
        max_context: int,
        stream_min: int = STREAM_MIN,
        beside: Callable[[int], int] = lambda rows: 0,
    ) -> Tiering:
        """Of the experts of a pack that a meter has seen."""
        types = {name: tensor.type for name, tensor in pack.items()}
        sizes = [ExpertSize(*each) for each in meter.expert_sizes]
        return cls(pack.spec, types, sizes, asked, max_context, stream_min, beside)

    @property
    def stream_min(self) -> int:
        """Rows from which a chunk streams its experts."""
        return self._model.stream_min

    @property
    def price(self) -> Price:
        """Of a chunk's workspace, where experts do not all lie in VRAM."""
        return self._price

    def loan_room(self, own: int, head: int, stays: int, placement: Placement) -> LoanRoom:
        """What a prompt could do with the memory of the output head beside so much of its own."""
        model, whole = self._model, BUFFERS * self._model.experts
        missing = (placement.begins < 0).sum(1).tolist()
        ring = ring_bytes(self._asked.ring or whole, model.largest)
        return LoanRoom(
            own=own,
            head=head,
            most=min(self._asked.prefill or model.most, model.most),
            ring=min(ring_bytes(min(LENT_RING, whole), model.largest), ring),
            ring_step=BUFFERS * model.largest,
            ring_most=ring,
            ring_alone=min(ring_bytes(min(RING, whole), model.largest), ring),
            missing=sum(n * size.n_bytes for n, size in zip(missing, model.sizes, strict=True)),
            layers=len(model.sizes),
            stream_min=model.stream_min,
            stays=stays,
        )

    def helpers(self, card: Card, placement: Placement) -> HostExperts | None:
        """Who computes experts beside a card; None where it reads all that it misses."""
        asked, filed = self._asked, np.flatnonzero(placement.filed.any(1)).tolist()
        if asked.pcie == 1 and not filed:
            return None
        return HostExperts(card, len(self._model.sizes), asked.pcie, asked.threads, filed)

    def fit_whole(self, left: int) -> bool:
        """Whether all experts are to lie in VRAM: they are wanted there, and what is left behind weights and state has
        room for a prompt chunk."""
        wanted = self._asked.cache == 0 or self._asked.cache >= len(self._model.sizes) * self._model.experts
        chunk = min(self._asked.prefill or OWN_AUTO, self._model.most)
        return wanted and left >= FREE_WHOLE + self._whole(chunk)

    def room_for_state(self, left: int) -> int:
        """What the state may take of what is left behind dense weights and reserve: batch slots and checkpoints come
        behind a short prompt and a small cache."""
        model = self._model
        cache = min(CACHE_FIRST, len(model.sizes) * model.experts) * model.largest
        return left - self._price(min(GRID, model.most)) - cache

    def plan(self, free: int, ram: int, fixed: int, alias: bool = False, at_most: int | None = None) -> TierPlan:
        """What becomes of so many bytes of the card, and of so much RAM, of which the n-gram table has its own. fixed:
        of the card, taken later · alias: prompts have the output head's memory, and so borrow no slots · at_most: bytes
        of the cache."""
        parked = self._asked.source.parked
        left = ram - STAGING - (parked.budget if parked.on else 0)
        asked = replace(self._asked, alias=alias, borrow=self._asked.borrow and not alias)
        if at_most is not None:
            asked = replace(asked, cache=max(1, at_most // self._model.largest))
        try:
            return plan_tiers(free, asked, self._model, left, fixed)
        except DoesNotFit as error:
            raise DeviceError(str(error)) from None

    @property
    def given(self) -> bool:
        """Whether somebody asked for a size of the cache."""
        return self._asked.cache > 0

    def behind(self, plan: TierPlan, lent: bool) -> int:
        """Bytes that are taken behind the cache or stay free. lent: prompts have memory already."""
        own = plan.ring_bytes + self._model.own(plan.chunks[0]) if plan.borrow is None else plan.borrow.own_bytes
        return plan.staged_bytes + plan.reserve + plan.fixed + (0 if lent else own)

    def share(self, chunk: int, beside: int = 0, mixer_rows: int = MIXER_ROWS) -> float:
        """Of a chunk's workspace, what lives for a whole pass, with so many bytes beside the pass's own."""
        whole, work = (self._price if mixer_rows else self._whole).parts(chunk)
        whole = max(whole, self._price.windows) + beside
        return whole / (whole + work)

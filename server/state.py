"""What every handler can reach."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from aiohttp import web
from anyio import CapacityLimiter

from .chat.template import Chat
from .metrics import Metrics
from .service import Service
from .settings import Settings

PREPARING_AT_ONCE = 4  # threads that render and encode prompts


@dataclass(slots=True)
class State:
    settings: Settings
    chat: Chat
    metrics: Metrics
    service: Service
    preparing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(PREPARING_AT_ONCE))
    started_at: float = field(default_factory=time.time)

    @property
    def context(self) -> int:
        """The engine's context; before it has ever been up, the model's own length."""
        return self.service.context or self.chat.vocabulary.context_length or 0


STATE: web.AppKey[State] = web.AppKey("state", State)

"""Whether a card that holds all experts for good keeps them in their card forms (`kernels.formats.CARD_FORMS`). Pure.

Faster to multiply and a little larger, with the same bits; so they come behind all that was asked for. Experts that
change places or stream have the bytes of the file.

Units    bytes
"""

from __future__ import annotations

from typing import Final

from strata.engine.device.arena import MIB

ROOM: Final = 3584 * MIB
"""VRAM that stays: the workspace of the longest prompt chunk, the reserve, and at start what weights come through."""


def takes_forms(more: int, left: int, wanted: bool) -> bool:
    """`more`: what the forms take beyond the file's bytes · `left`: of the card, with weights and state taken · wanted:
    nobody has switched them off."""
    return wanted and more + ROOM <= left

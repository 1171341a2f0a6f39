"""Card forms come behind all that was asked for: a card that is just large enough must not lose its prompt for them."""

from __future__ import annotations

from strata.engine.memory.forms import ROOM, takes_forms


def test_forms_leave_room_for_a_prompt_chunk():
    assert takes_forms(1000, ROOM + 1000, True) and not takes_forms(1001, ROOM + 1000, True)
    assert not takes_forms(1, 0, True)


def test_a_full_card_keeps_the_bytes_of_the_file_even_where_forms_take_no_more():
    assert not takes_forms(0, ROOM - 1, True) and takes_forms(0, ROOM, True)


def test_forms_can_be_switched_off():
    assert not takes_forms(0, 2 * ROOM, False)

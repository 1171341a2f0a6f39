"""strata-engine as a program, with a plan that lends the head of a small pack, on a card without hardware.

    lending_engine.py FOLDER [--card] OPTIONS..     FOLDER: for compiled kernels

--card       the real card
Log          how much memory of the card is free where a request begins, of each request
Test hook    STRATA_TEST_HEAD_MOVE holds for the first start in the working folder alone
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from strata.engine import __main__ as engine
from strata.engine import options
from strata.engine.device import cuda
from strata.engine.memory import loan

CHUNK, STAYS = 22, 10


def lending(room: loan.LoanRoom, price: loan.Priced) -> loan.LoanPlan:
    """The ring in the head, all else beside it."""
    whole, work = price.parts(CHUNK)
    first, last = whole + room.beside, whole + room.beside + work
    assert room.ring_step <= room.head
    pieces = loan.Piece(False, 0, first), loan.Piece(False, first, last), loan.Piece(True, 0, room.ring_step)
    return loan.LoanPlan(CHUNK, 0, STAYS, *pieces, max(last, 4 * price(STAYS)), room.beside)


def emulated(folder: Path, stack: ExitStack) -> None:
    """Put a card without hardware where the engine looks for one."""
    from emulated_card import EmulatedCard  # beside this program

    card = stack.enter_context(EmulatedCard(folder).plugged_in())
    stack.enter_context(mock.patch.object(cuda, "CupyDriver", card.driver))
    stack.enter_context(mock.patch.object(options, "find_spec", lambda name: name))


def main() -> int:
    folder, *argv = sys.argv[1:]
    mark = Path("started")
    if mark.exists():
        os.environ.pop("STRATA_TEST_HEAD_MOVE", None)
    mark.touch()
    real = "--card" in argv
    sys.argv = ["strata-engine", *(word for word in argv if word != "--card")]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loan, "plan_loan", lending))
        if not real:
            emulated(Path(folder), stack)
        stack.enter_context(mock.patch("strata.engine.cuda_runner.SCARCE", 1 << 60))  # loads it, with the plan above
        return engine.main()


if __name__ == "__main__":
    sys.exit(main())

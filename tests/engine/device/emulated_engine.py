"""strata-engine on an emulated card: `python emulated_engine.py FOLDER [option..]`, whose kernels are kept in FOLDER.

FAIL_FROM=n     the card and the machine have no memory from the n-th piece on that is asked for
FAULT=file      while the file exists the next prompt's work on the card fails, once: the file is removed
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock


def main() -> int:
    folder = Path(sys.argv.pop(1))
    from emulated_card import EmulatedCard  # these two lie beside this program
    from failing_card import FailingDriver

    import strata.engine.__main__ as engine
    from strata.engine import options
    from strata.engine.device import cuda
    from strata.kernels.cuda.compile import DeviceError

    first, fault = int(os.environ.get("FAIL_FROM", "0")), os.environ.get("FAULT")

    class Driver(FailingDriver):
        def synchronize(self) -> None:
            self._driver.synchronize()
            if fault and self._driver.sealed and Path(fault).exists():
                Path(fault).unlink()
                raise DeviceError("work on the card failed: a fault that a test asked for")

    with EmulatedCard(folder).plugged_in() as card:
        driver = Driver(card.driver(), first, sys.maxsize if first else 0)
        plugged = mock.patch.object(cuda, "CupyDriver", lambda: driver)
        with plugged, mock.patch.object(options, "find_spec", lambda _: 1):
            return engine.main()


if __name__ == "__main__":
    sys.exit(main())

"""strata-engine on an emulated card: `python emulated_engine.py FOLDER [option..]`, whose kernels are kept in FOLDER.

FAIL_FROM=n     the card and the machine have no memory from the n-th piece on that is asked for
FAULT=file      while the file exists the next prompt's work on the card fails, once: the file is removed
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent


def _load(name: str) -> object:
    spec = importlib.util.spec_from_file_location(f"strata_test_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    folder = Path(sys.argv.pop(1))
    import strata.engine.__main__ as engine
    from strata.engine import options
    from strata.engine.device import cuda
    from strata.kernels.cuda.compile import DeviceError

    failing = _load("failing_card")
    first, fault = int(os.environ.get("FAIL_FROM", "0")), os.environ.get("FAULT")

    class Driver(failing.FailingDriver):
        def synchronize(self) -> None:
            self._driver.synchronize()
            if fault and self._driver.sealed and Path(fault).exists():
                Path(fault).unlink()
                raise DeviceError("work on the card failed: a fault that a test asked for")

    with _load("emulated_card").EmulatedCard(folder).plugged_in() as card:
        driver = Driver(card.driver(), first, sys.maxsize if first else 0)
        plugged = mock.patch.object(cuda, "CupyDriver", lambda: driver)
        with plugged, mock.patch.object(options, "find_spec", lambda _: 1):
            return engine.main()


if __name__ == "__main__":
    sys.exit(main())

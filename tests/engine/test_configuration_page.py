"""docs/configuration.md is generated; a page that nobody generated again would teach options that are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).resolve().parents[2] / "docs" / "generate.py"


def test_the_configuration_page_is_current():
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")

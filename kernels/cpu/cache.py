"""Where compiled kernels are kept: a directory that changes whenever any source of this folder does.

numba looks at the file of a cached function only, not at the intrinsics that it was compiled with, so a changed
instruction sequence would live on in an old cache. The directory therefore carries a hash of all sources of
`kernels/cpu` and of what they import from `kernels`, the versions of numba and llvmlite, and the processor's name.

Import this module before any kernel is defined (the package does). NUMBA_CACHE_DIR, when set, is left alone.
Errors   none: a directory that cannot be written is replaced by a temporary one, with a line in the log
Cost     reads some twenty small files once
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding
import numba

log = logging.getLogger(__name__)

_settings: Final[Any] = numba.config


def fingerprint() -> str:
    """Hash of everything that the machine code of a kernel depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    others = (here.parent / "ops.py", here.parent / "formats.py", here.parent / "reference" / "quant.py")
    for source in (*sorted(here.glob("*.py")), *others):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    for part in (numba.__version__, llvmlite.__version__, llvmlite.binding.get_host_cpu_name(), features):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def directory() -> Path:
    """The user's cache directory for these sources; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "strata" / f"numba-{fingerprint()}"


def use(path: Path) -> Path:
    """Make numba keep its files under `path`, or under a temporary directory when `path` cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="strata-numba-"))
        log.warning("kernel cache %s cannot be written (%s); kernels are compiled into %s", path, error, fallback)
        path = fallback
    _settings.CACHE_DIR = str(path)
    return path


if not _settings.CACHE_DIR:
    use(directory())

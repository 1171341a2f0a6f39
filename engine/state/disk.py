"""Parked conversations on disk: one file each, written beside the work, found again after a restart.

Files    docs/parking.md. Named by fingerprint and tokens; a file appears whole or not at all: temporary name, fsync,
         rename, fsync of the folder
Reads    the heads at the start; a whole file when a prompt begins with it. A file of another model or engine, an
         unfinished or a damaged one is left alone and counted, never loaded
Budget   bytes of all such files in the folder, whoever wrote them. Above it the least recently used go
Errors   DiskError when the folder cannot be used at the start; later ones are counted and logged
Cost     one thread that writes; `keep` waits for it when the one before is still under way
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from strata.engine.log import log
from strata.engine.state.checkpoints import is_prefix
from strata.engine.state.parked import Parked
from strata.engine.state.parked_file import Figures, NotOurs, Torn, head_bytes, read_file, read_head, write_file
from strata.kernels.ops import I32

SUFFIX: Final = ".parked"
UNFINISHED: Final = ".unfinished"


MOST_WAITING: Final = 2
"""Conversations that are being written or wait for it: bounds the RAM that they hold."""


class DiskError(Exception):
    """The folder of parked conversations cannot be used. One line."""


@dataclass(slots=True)
class DiskCounts:
    """Since the start: files written and that could not be, continued from, deleted for room, and those left alone:
    of another model or engine, not whole, damaged."""

    written: int = 0
    failed: int = 0
    hits: int = 0
    deleted: int = 0
    foreign: int = 0
    torn: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """A file whose head was read. positions: lengths that it can be continued from."""

    path: Path
    tokens: I32
    positions: tuple[int, ...]


@dataclass(slots=True)
class ParkingDisk:
    """`budget` bytes in `folder`. fingerprint: of model and engine, `fingerprint.py`; figures: sizes of its states."""

    folder: Path
    budget: int
    fingerprint: bytes
    figures: Figures
    counts: DiskCounts = field(default_factory=DiskCounts)
    _shelved: dict[Path, Shelved] = field(default_factory=dict)
    _waiting: deque[Parked] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            for path in sorted(self.folder.glob(f"*{SUFFIX}")):
                self._look_at(path)
        except OSError as error:
            raise DiskError(f"parked conversations cannot lie in {self.folder}: {error.strerror or error}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise DiskError(f"parked conversations cannot lie in {self.folder}: it is not writable")
        left = self.counts.foreign + self.counts.torn + self.counts.damaged
        log(f"parked on disk: {len(self._shelved)} conversations in {self.folder}, {left} files left alone")

    def _look_at(self, path: Path) -> None:
        """Read the head of a file that lies there."""
        try:
            tokens, positions = read_head(path, self.fingerprint, self.figures)
        except NotOurs:
            self.counts.foreign += 1
        except Torn as error:
            self.counts.torn += 1
            log(f"parked on disk: {path.name} is left alone, {error}")
        except OSError as error:
            self.counts.damaged += 1
            log(f"parked on disk: {path.name} cannot be read: {error.strerror or error}")
        else:
            self._shelved[path] = Shelved(path, tokens, positions)

    # ------------------------------------------------------------------------------------------------------------ read

    @property
    def shelved(self) -> tuple[Shelved, ...]:
        """What can be continued from."""
        with self._changed:
            return tuple(self._shelved.values())

    def load(self, shelved: Shelved) -> Parked | None:
        """The conversation in a file. None, and it is not found again in this run, when it is not what was parked."""
        path = shelved.path
        try:
            parked = read_file(path, self.fingerprint, self.figures)
            _use(path)
        except (NotOurs, Torn, OSError) as error:
            parked, why = None, str(error)
        else:
            why = "its bytes have changed"
        if parked is not None and parked.is_intact and np.array_equal(parked.tokens, shelved.tokens):
            self.counts.hits += 1
            return parked
        with self._changed:
            self._shelved.pop(path, None)
        self.counts.damaged += 1
        log(f"parked on disk: {path.name} is not used, {why}; the prompt is read")
        return None

    # ----------------------------------------------------------------------------------------------------------- write

    def has(self, tokens: I32) -> bool:
        """Whether just these tokens lie there."""
        return any(len(s.tokens) == len(tokens) and is_prefix(s.tokens, tokens) for s in self.shelved)

    def admits(self, n_bytes: int) -> bool:
        """Whether a conversation of so many bytes is within the budget, with some room for its head."""
        return n_bytes + n_bytes // 64 + 4096 <= self.budget

    def keep(self, parked: Parked) -> None:
        """Write a conversation, soon. Waits while another one waits."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MOST_WAITING)
            self._waiting.append(parked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="parking", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, parked: Parked | None = None) -> None:
        """Until nothing waits to be written, or not this one."""
        with self._changed:
            self._changed.wait_for(lambda: parked not in self._waiting if parked else not self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                parked = self._waiting[0]
            try:
                self._write(parked)
            except (OSError, Torn) as error:
                self.counts.failed += 1
                log(f"parked on disk: {len(parked.tokens)} tokens could not be written: {error}")
            del parked
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _write(self, parked: Parked) -> None:
        name = hashlib.blake2b(self.fingerprint + parked.tokens.tobytes(), digest_size=16).hexdigest()
        path = self.folder / f"{name}{SUFFIX}"
        head = head_bytes(parked, self.fingerprint)
        old = {s.path for s in self.shelved if s.path != path and is_prefix(s.tokens, parked.tokens)}
        self._make_room(len(head) + parked.n_bytes - parked.tokens.nbytes, old)
        unfinished = path.with_name(f"{name}.{os.getpid()}{UNFINISHED}")
        try:
            write_file(unfinished, head, parked)
            _use(unfinished)
            os.replace(unfinished, path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        _sync_folder(self.folder)
        with self._changed:
            self._shelved[path] = Shelved(path, parked.tokens, parked.positions)
        self.counts.written += 1
        for each in old:
            self._delete(each)

    def _make_room(self, need: int, old: Collection[Path]) -> None:
        """Delete files until so many bytes more are within the budget: what the new one supersedes, then the least
        recently used."""
        files = []
        for path in self.folder.iterdir():
            if path.name.endswith((SUFFIX, UNFINISHED)):
                with suppress(FileNotFoundError):  # another engine may have deleted it
                    status = path.stat()
                    files.append((path not in old, status.st_mtime_ns, status.st_size, path))
        over = sum(size for _, _, size, _ in files) + need - self.budget
        for _, _, size, path in sorted(files):
            if over <= 0:
                return
            self._delete(path)
            self.counts.deleted += 1
            over -= size

    def _delete(self, path: Path) -> None:
        with self._changed:
            self._shelved.pop(path, None)
        with suppress(FileNotFoundError):
            path.unlink()


def _use(path: Path) -> None:
    """The file was used now. A file system's own clock may stand still for milliseconds."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder lasting."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

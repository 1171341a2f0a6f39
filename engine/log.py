"""The human log: one line per event on stderr, with the time. Never on stdout, which belongs to the protocol.

Other modules of the engine use `logging` as usual; `configure` gives their lines the same form.
"""

from __future__ import annotations

import logging
import traceback

_MAX_CHARS = 4000
_logger = logging.getLogger("strata.engine")


class _OneLine(logging.Formatter):
    """The time and the message on one line of bounded length; tracebacks are `log_traceback`'s business."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage()[:_MAX_CHARS].splitlines())
        return f"{self.formatTime(record, '%H:%M:%S')} engine: {text}"


def configure() -> None:
    """Send the lines of all loggers to stderr. A log that nobody reads any more is no reason to stop serving."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    _logger.setLevel(logging.INFO)


def log(text: str) -> None:
    _logger.info("%s", text)


def log_traceback(error: BaseException) -> None:
    """The traceback of a failure, line by line."""
    for block in traceback.format_exception(error):
        for line in block.rstrip("\n").splitlines():
            log(line)

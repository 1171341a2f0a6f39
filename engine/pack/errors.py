"""What is wrong with a model file, in one line."""

from __future__ import annotations

from pathlib import Path


class PackError(Exception):
    """A file that cannot be used as a pack. The message is one line: file, tensor or key, reason.

    path · what (a tensor, a metadata key, or "" for the file as a whole) · reason
    """

    def __init__(self, path: Path | str, what: str, reason: str) -> None:
        self.path = Path(path)
        self.what = what
        self.reason = reason
        super().__init__(": ".join(shown(part, 400) for part in (str(path), what, reason) if part))


def shown(text: str, limit: int = 80) -> str:
    """`text` on one line and not endless: what a file says is not printed raw."""
    clean = text if text.isprintable() else text.encode("unicode_escape", "surrogateescape").decode("ascii")
    return clean if len(clean) <= limit else clean[:limit] + "..."

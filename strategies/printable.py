"""Text that may come from whoever sent a message, made fit for logs and errors."""

from __future__ import annotations

_REASON_CHARACTERS = 400


def printable(reason: str, most: int = _REASON_CHARACTERS) -> str:
    """One line of at most so many characters, for logs and errors: parts of it may come from whoever sent a message."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in reason[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."

"""What the site makes of links to files of the repository: it has none of these, so the name alone stays."""

from __future__ import annotations

import re
from typing import Any

_TARGETS = (
    r"\.\./(?!\.\./[\w-]+\.md|[\w-]+/README\.md)[^)]*",
    r"[^)#:]*\.(?:json|jsonl|csv)",
    r"results/[^)#.]*/?",
    r"notebooks/[^)]*",
)
"""Files outside ``docs``, rows of figures, folders and notebooks; of a figure's page also those that lie beside it."""
_OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:{'|'.join(_TARGETS)})\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links that lead out of ``docs`` into their text."""
    return _OUTSIDE.sub(lambda found: found[1] if found[1].startswith("`") else f"`{found[1]}`", markdown)

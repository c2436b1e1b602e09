"""Identity of the run that a file belongs to, and JSON with its own digest."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from client_pipeline.documents import json_value


class RunIdentity(NamedTuple):
    """A run, over all the times that it was continued; in every file that it goes on from."""

    run: str = ""
    """Drawn when the run began: a name may be used again, this is not."""
    config: str = ""
    """SHA-256 of what is computed: see :func:`config_digest`."""

    @classmethod
    def fresh(cls, config: str) -> RunIdentity:
        """Draw that of a new run."""
        return cls(secrets.token_hex(16), config)


def config_digest(values: Mapping[str, object]) -> str:
    """SHA-256 of configuration keys with their values, in hexadecimal."""
    return _digest(json.dumps(dict(values), sort_keys=True))


def sealed(value: Mapping[str, Any]) -> str:
    """JSON text of an object, with its own SHA-256."""
    text = json.dumps(dict(value))
    return json.dumps({"sha256": _digest(text), "value": json.loads(text)})


def unsealed(text: str) -> dict[str, Any]:
    """Return the object of a sealed text.

    Raises
    ------
    ValueError
        If the text is torn or changed, or was never sealed.
    """
    sealed = json_value(text)
    if not isinstance(sealed, dict) or sealed.keys() != {"sha256", "value"} or not isinstance(sealed["value"], dict):
        raise ValueError("expected an object with its SHA-256, found other JSON")
    value: dict[str, Any] = sealed["value"]
    if _digest(json.dumps(value)) != sealed["sha256"]:
        raise ValueError(f"expected SHA-256 {str(sealed['sha256'])[:12]}, found {_digest(json.dumps(value))[:12]}")
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()

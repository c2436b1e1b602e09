"""Keys, options and commands of earlier releases: each is refused by name, with what takes its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RemovedKey(NamedTuple):
    """A configuration key that an earlier release had."""

    default: bool | int | float | str
    """Value with which it asked for nothing: configurations that were written in full have it, and stay valid."""
    instead: str
    """Remedy: the key or step that takes its place."""
    release: str = "0.2.0"
    """Release that removed it."""


REMOVED_KEYS: dict[str, RemovedKey] = {
    "planner.lookahead": RemovedKey(1, "each round is planned by itself; leave the key out"),
    "privacy.secure-aggregation": RemovedKey(
        False,
        "SecAgg+ hides single updates, and the server reads activations that say more: set privacy.activation-clip and "
        "privacy.activation-noise, or privacy.update-noise",
    ),
}
_JOIN = (
    "let this machine join: collapipe invite on the edge server (with --file for a machine without a network), and "
    "collapipe join here; a control unit of collapipe certs loses its place first by collapipe revoke --cluster N"
)
REMOVED_COMMANDS: dict[str, str] = {
    "certs": "collapipe up edge-server --name HOST makes the edge server's certificates, and boxes join by a code or "
    "by files: collapipe invite",
    "up cu": _JOIN,
    "up device": _JOIN,
    "doctor cu": "collapipe doctor box checks a control unit that has joined",
    "doctor device": "collapipe doctor box checks a device that has joined",
}
"""Command -> what takes its place."""
REMOVED_OPTIONS: dict[tuple[str, str], str] = {
    ("plan", "--lookahead"): "each round is planned by itself; leave the option out",
}
"""Command and option -> what takes its place. All commands and options here were removed by release 0.2.0."""


def without_removed_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat configuration without removed keys that have their former default.

    Raises
    ------
    ValueError
        For a removed key with any other value; the message names the release and what takes its place.
    """
    for key, removed in REMOVED_KEYS.items():
        value = flat.get(key, removed.default)
        if type(value) is not type(removed.default) or value != removed.default:
            raise ValueError(
                f"{key}: CollaPipe {removed.release} removed this key, found {value!r:.80}; {removed.instead}"
            )
    return without_kept_keys(flat)


def without_kept_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a finished run, of this release or an earlier one, without removed keys."""
    return {key: value for key, value in flat.items() if key not in REMOVED_KEYS}


def refuse_removed(arguments: Sequence[str]) -> None:
    """Refuse a command, or an option of one, that an earlier release had."""
    for command, instead in REMOVED_COMMANDS.items():
        if list(arguments[: len(command.split())]) == command.split():
            raise ValueError(f"{command}: CollaPipe 0.2.0 removed this command; {instead}")
    command = arguments[0] if arguments else ""
    for argument in arguments[1:]:
        if argument == "--":
            return
        option = argument.partition("=")[0]
        if (command, option) in REMOVED_OPTIONS:
            instead = REMOVED_OPTIONS[command, option]
            raise ValueError(f"{command} {option}: CollaPipe 0.2.0 removed this option; {instead}")

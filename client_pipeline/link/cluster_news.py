"""News of a cluster during a round: faults as they happen, and devices without a sign of life."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

MOST_NEWS_BYTES = 12 * 1024
"""Longest text of one piece of news [byte]."""
SILENT, ENDED = "silent", "ended"
_MOST_FAULTS, _MOST_SIGNS = 20, 64
_REASON_CHARACTERS = 200
_LARGEST = 1e9
_NUMBERS = ("cluster", "round", "device", "step", "bytes")
_FAULT_FIELDS = {*_NUMBERS, "kind", "recovered", "seconds", "reason"}


class LifeSign(NamedTuple):
    """A device that gives no sign of life."""

    device: int
    state: str
    """``silent``: no answer; ``ended``: its process is gone."""
    seconds: float
    """For how long by now [s]: the clocks of two machines differ."""


@dataclass(frozen=True, kw_only=True)
class ClusterNews:
    """State of a cluster's round at this moment; it replaces the news before it."""

    round: int
    is_over: bool = False
    """True if the cluster's round has ended: its faults then stand in the round's line."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Fields of :class:`client_pipeline.runtime.transport.faults.FaultRecord`; the newest come last."""
    signs: Sequence[LifeSign] = ()

    def to_text(self) -> str:
        """JSON; of very many faults the newest."""
        shortened = [
            {**fault, "reason": str(fault.get("reason", ""))[:_REASON_CHARACTERS]}
            for fault in self.faults[-_MOST_FAULTS:]
        ]
        signs = [list(sign) for sign in self.signs[:_MOST_SIGNS]]
        return json.dumps(asdict(self) | {"faults": shortened, "signs": signs})

    @classmethod
    def from_text(cls, text: str, cluster: int, printable: Callable[[str], str]) -> ClusterNews:
        """Read what came over a network.

        Parameters
        ----------
        text : of :meth:`to_text`
        cluster : whose it has to be
        printable : takes control characters out of a text

        Raises
        ------
        ValueError
            If it is anything else; the message does not repeat it.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError("news: expected JSON") from error
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"news: expected an object with {', '.join(cls.__dataclass_fields__)}")
        faults, signs = fields["faults"], fields["signs"]
        _expect(_is_number(fields["round"], 1) and isinstance(fields["is_over"], bool), "round and is_over")
        _expect(isinstance(faults, list) and len(faults) <= _MOST_FAULTS, f"at most {_MOST_FAULTS} faults")
        _expect(isinstance(signs, list) and len(signs) <= _MOST_SIGNS, f"at most {_MOST_SIGNS} signs")
        return cls(
            round=fields["round"],
            is_over=fields["is_over"],
            faults=[_fault_of(fault, cluster, printable) for fault in faults],
            signs=[_sign_of(sign) for sign in signs],
        )


def _fault_of(fault: Any, cluster: int, printable: Callable[[str], str]) -> dict[str, Any]:
    _expect(isinstance(fault, dict) and set(fault) == _FAULT_FIELDS, "the fields of a fault")
    _expect(all(_is_number(fault[name]) for name in _NUMBERS if name != "device"), "numbers in a fault")
    _expect(fault["device"] is None or _is_number(fault["device"]), "the number of a device")
    _expect(fault["seconds"] is None or _is_number(fault["seconds"], whole=False), "seconds")
    _expect(isinstance(fault["recovered"], bool) and fault["cluster"] == cluster, "faults of the sender's own")
    _expect(isinstance(fault["kind"], str) and fault["kind"].isalpha() and len(fault["kind"]) <= 20, "a kind")
    _expect(isinstance(fault["reason"], str) and len(fault["reason"]) <= _REASON_CHARACTERS, "a short reason")
    return {**fault, "reason": printable(fault["reason"])}


def _sign_of(sign: Any) -> LifeSign:
    _expect(isinstance(sign, list) and len(sign) == 3, "a device, its state and seconds")
    device, state, seconds = sign
    _expect(_is_number(device) and state in (SILENT, ENDED), f"a device that is {SILENT} or {ENDED}")
    _expect(_is_number(seconds, whole=False), "seconds")
    return LifeSign(device, state, float(seconds))


def _is_number(value: Any, least: int = 0, *, whole: bool = True) -> bool:
    kinds = int if whole else (int, float)
    # NaN is in no range.
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= _LARGEST


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"news: expected {what}")

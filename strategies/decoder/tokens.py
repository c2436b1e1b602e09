"""The tokens of a round's streams: each opens one, and the next one of a stream that was cut."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import NamedTuple

_BYTES = 32


class Admission(NamedTuple):
    """Stream that a token has opened."""

    number: int
    """Streams of the cluster before this one."""
    resume: str
    """Token of the next stream, for the case that this one is cut."""


class RoundTokens:
    """Tokens of a round. Threads that share an object must hold a lock around every call."""

    def __init__(self) -> None:
        self.round = 0
        """The newest round that was opened."""
        self._first_tokens: dict[int, str] = {}
        self._resume: dict[int, list[str]] = {}
        """Tokens of the next stream of each cluster that has one; the newest is last."""
        self._newest: dict[int, int] = {}
        """Number of each cluster's newest stream."""
        # Stands in for a cluster without a token, so that the comparison takes as long.
        self._nobodys = secrets.token_urlsafe(_BYTES)

    def open(self, round_: int, clusters: Iterable[int]) -> dict[int, str]:
        """Return a token of each cluster for a new round; all older ones become invalid."""
        self.close()
        self.round = round_
        self._first_tokens = {cluster: secrets.token_urlsafe(_BYTES) for cluster in clusters}
        return dict(self._first_tokens)

    def close(self) -> None:
        """End the round: its tokens become invalid."""
        self._first_tokens, self._resume, self._newest = {}, {}, {}

    def admit(self, cluster: int, round_: object, token: object) -> Admission:
        """Open a stream with a token.

        The round's own token is valid once. A token that opens a stream again stays valid until :meth:`hear`, because
        the welcome with the next one may be lost or come too late.

        Raises
        ------
        PermissionError
            If the token is wrong, or was used; the reason tells nothing about the right one.
        """
        resume = self._resume.get(cluster, [self._nobodys])
        matching_tokens = [good for good in resume if _is_equal(good, token)] if round_ == self.round else []
        if not matching_tokens:
            self.check(cluster, round_, token)
            if cluster in self._newest:
                raise PermissionError(f"the token of cluster {cluster} has been used in round {self.round}")
        number = self._newest[cluster] = self._newest.get(cluster, -1) + 1
        self._resume[cluster] = [*matching_tokens, secrets.token_urlsafe(_BYTES)]
        return Admission(number, self._resume[cluster][-1])

    def hear(self, round_: int, cluster: int, number: int) -> None:
        """Note that a stream's first frame has come: its control unit has the next token, and needs no older one."""
        if round_ == self.round and number == self._newest.get(cluster):
            del self._resume[cluster][:-1]

    def check(self, cluster: int, round_: object, token: object) -> None:
        """Raise PermissionError if this is not the cluster's token of the round."""
        right = _is_equal(self._first_tokens.get(cluster, self._nobodys), token)
        if not right or cluster not in self._first_tokens or round_ != self.round:
            raise PermissionError(
                f"the token is not one of cluster {cluster} in round {round_}, or the round has ended"
            )


def _is_equal(expected: str, token: object) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(expected.encode(), str(token).encode(errors="surrogatepass"))

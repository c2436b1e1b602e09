"""The tokens of a round's streams: each opens one, and the next one of a stream that was cut."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import NamedTuple

_BYTES = 32


class Admission(NamedTuple):
    """What a token has opened."""

    number: int
    """Streams of the cluster before this one."""
    resume: str
    """The token of the stream that follows this one if it is cut."""


class RoundTokens:
    """Makes and checks tokens; whoever shares an object between threads holds a lock around every call."""

    def __init__(self) -> None:
        self.round = 0
        """The newest round that was opened."""
        self._first_tokens: dict[int, str] = {}
        self._resume: dict[int, list[str]] = {}
        """Of each cluster with a stream: the tokens of the next one. The newest is last."""
        self._newest: dict[int, int] = {}
        """Number of each cluster's newest stream."""
        # A cluster without a token is compared with one that nobody has: that takes as long.
        self._nobodys = secrets.token_urlsafe(_BYTES)

    def open(self, round_: int, clusters: Iterable[int]) -> dict[int, str]:
        """Return a token of each cluster for a new round; all older ones are worth nothing."""
        self.close()
        self.round = round_
        self._first_tokens = {cluster: secrets.token_urlsafe(_BYTES) for cluster in clusters}
        return dict(self._first_tokens)

    def close(self) -> None:
        """End the round: its tokens are worth nothing."""
        self._first_tokens, self._resume, self._newest = {}, {}, {}

    def admit(self, cluster: int, round_: object, token: object) -> Admission:
        """Open a stream with a token.

        The round's own token is used up by that. One that opens a stream again stays good until :meth:`hear`: the
        welcome with the next one may be lost, or come when nobody waits for it any more.

        Raises
        ------
        PermissionError
            If the token is neither that nor the round's, or was used; the reason tells nothing about the right token.
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

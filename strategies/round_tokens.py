"""The tokens of a round's streams: each opens one, and the next one of a stream that was cut."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

_BYTES = 32


class RoundTokens:
    """Makes and checks tokens; whoever shares an object between threads holds a lock around every call."""

    def __init__(self) -> None:
        self.round = 0
        """The newest round that was opened."""
        self._first: dict[int, str] = {}
        self._next: dict[int, str] = {}
        self._used: set[int] = set()
        # A cluster without a token is compared with one that nobody has: that takes as long.
        self._nobodys = secrets.token_urlsafe(_BYTES)

    def open(self, round_: int, clusters: Iterable[int]) -> dict[int, str]:
        """Return a token of each cluster for a new round; all older ones are worth nothing."""
        self.close()
        self.round = round_
        self._used = set()
        self._first = {cluster: secrets.token_urlsafe(_BYTES) for cluster in clusters}
        return dict(self._first)

    def close(self) -> None:
        """End the round: its tokens are worth nothing."""
        self._first, self._next = {}, {}

    def admit(self, cluster: int, round_: object, token: object) -> bool:
        """Use up a token.

        Returns
        -------
        Whether it is the one that opens a stream again after a cut.

        Raises
        ------
        PermissionError
            If the token is neither that nor the round's, or was used; the reason tells nothing about the right token.
        """
        again = _same(self._next.get(cluster, self._nobodys), token) and round_ == self.round
        if not again:
            self.check(cluster, round_, token)
            if cluster in self._used:
                raise PermissionError(f"the token of cluster {cluster} has been used in round {self.round}")
        self._used.add(cluster)
        self._next.pop(cluster, None)
        return again

    def check(self, cluster: int, round_: object, token: object) -> None:
        """Raise PermissionError if this is not the cluster's token of the round."""
        right = _same(self._first.get(cluster, self._nobodys), token)
        if not right or cluster not in self._first or round_ != self.round:
            raise PermissionError(
                f"the token is not one of cluster {cluster} in round {round_}, or the round has ended"
            )

    def next(self, round_: int, cluster: int) -> str:
        """Return the token for the stream that follows a cut; worth nothing if the round is over."""
        token = secrets.token_urlsafe(_BYTES)
        if round_ == self.round:
            self._next[cluster] = token
        return token


def _same(expected: str, found: object) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(expected.encode(), str(found).encode(errors="surrogatepass"))

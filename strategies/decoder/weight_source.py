"""Server end of pulled weights: pieces of the run's files for nodes that lack them, before round 1."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client_pipeline.link.frame_limits import PULLED_BYTES
from client_pipeline.link.frames import FrameError, decode
from client_pipeline.weights.base_weights import BaseWeights
from strategies.decoder.limits import HelloGuard, TooManyHellos, peer_name
from strategies.decoder.reception import StreamContext
from strategies.decoder.tokens import RoundTokens

_REQUEST_BYTES = 4096
_TIMES = 2
"""Times that a node may pull all files in one set-up: once, and again after a disk failure."""
_BEFORE_ROUND_1 = 0


class WeightSource:
    """Source of a run's frozen-weight files, by digest. Safe for several threads.

    Parameters
    ----------
    base : the run's frozen weights; None: there are no files, and every request is refused
    hellos : counts wrong requests
    most_bytes : limit of a piece [byte]
    """

    def __init__(self, base: BaseWeights | None, hellos: HelloGuard, most_bytes: int = PULLED_BYTES) -> None:
        self._files: dict[str, tuple[Path, int]] = {}
        if base is not None:
            self._files = {file.sha256: (base.folder / file.name, file.num_bytes) for file in base.files}
        self._hellos = hellos
        self._most_bytes = min(most_bytes, PULLED_BYTES)
        self._lock = threading.Lock()
        self._tokens = RoundTokens()
        self._bytes_left: dict[int, int] = {}
        """Bytes that each node may still pull."""
        self._served: set[int] = set()
        """Nodes that a thread reads for."""

    def open(self, num_nodes: int) -> dict[int, str]:
        """Let nodes pull; returns the token of each, by its number."""
        all_bytes = sum(num_bytes for _, num_bytes in self._files.values())
        with self._lock:
            self._bytes_left = dict.fromkeys(range(num_nodes), _TIMES * all_bytes)
            return self._tokens.open(_BEFORE_ROUND_1, range(num_nodes))

    def close(self) -> None:
        """End the pulls: the tokens become invalid."""
        with self._lock:
            self._tokens.close()

    def piece(self, data: bytes, context: StreamContext) -> bytes:
        """Answer one request.

        Raises
        ------
        TooManyHellos
            If the peer has sent too many wrong requests, or the node asks for more than all files twice.
        PermissionError
            For a wrong token; the reason tells nothing about the right one.
        FrameError
            If the request names no file of the run, or bytes beyond its end, or too many bytes.
        """
        peer = peer_name(context.peer_identities(), context.peer())
        self._hellos.check(peer)
        try:
            frame = decode(data, _REQUEST_BYTES)
            if frame.kind != "pull":
                raise FrameError(f"expected a pull frame, found {frame.kind}")
            node, offset, size = (int(frame.header[name]) for name in ("node", "offset", "size"))
            with self._lock:
                self._check_token(node, frame.header["token"])
            if frame.header["sha256"] not in self._files:
                raise FrameError("sha256 of a pull frame: expected that of a file of the run's frozen weights")
            path, num_bytes = self._files[frame.header["sha256"]]
            if size > self._most_bytes or offset + size > num_bytes:
                raise FrameError(
                    f"a pull frame: expected at most {self._most_bytes} of the file's {num_bytes} bytes, found "
                    f"{size} from {offset} on"
                )
        except (PermissionError, FrameError):
            self._hellos.wrong(peer, "wrong pull")
            raise
        with self._turn_of(node, size), path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def _check_token(self, node: int, token: object) -> None:
        try:
            self._tokens.check(node, _BEFORE_ROUND_1, token)
        except PermissionError:
            raise PermissionError("the token is not that of this node, or the set-up has ended") from None

    @contextmanager
    def _turn_of(self, node: int, size: int) -> Iterator[None]:
        """Allow a node one piece at a time, because each takes one of the service's threads."""
        with self._lock:
            if node in self._served:
                raise TooManyHellos("this node pulls another piece just now; try again later")
            if self._bytes_left.get(node, 0) < size:
                raise TooManyHellos(f"this node has pulled all files {_TIMES} times; start the run again")
            self._bytes_left[node] -= size
            self._served.add(node)
        try:
            yield
        finally:
            with self._lock:
                self._served.discard(node)

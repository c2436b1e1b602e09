"""Frozen weights that this machine lacks: pulled from the server in bounded pieces, into a cache by digest.

A file of the cache is named by its SHA-256. A file that is not complete is ``<digest>.partial``; a later pull, also by
another process, continues it. It gets its name when it is complete and has the digest of the set-up.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import cast

import grpc

from client_pipeline import durable
from client_pipeline.link.address import SERVICE, WEIGHTS_METHOD, DecoderAddress, LinkCertificates, open_channel
from client_pipeline.link.frame_limits import PULLED_BYTES
from client_pipeline.link.frames import encode
from client_pipeline.weights.base_weights import BaseFile, BaseWeights
from client_pipeline.weights.weight_files import weight_folder

_PIECE_S = 60.0
"""Longest time of one piece [s]."""
_PATIENCE_S = 60.0
"""Longest time of attempts to reach a server, for each piece [s]."""
STILL_S = 180.0
"""Longest time without progress of another control unit that pulls [s]; then the wait for it ends."""
_LOOK_S = 0.2
_PAUSES_S = (0.1, 0.3, 1.0, 3.0)
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # All of the service's threads are taken.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""Ends of a call that a network, or a busy server, may be the cause of."""


def weights_here(
    base: BaseWeights,
    cache: Path | None = None,
    address: DecoderAddress | None = None,
    certificates: LinkCertificates = LinkCertificates(),  # noqa: B008 (it is frozen)
) -> BaseWeights:
    """Return frozen weights with their files on this machine, compared with their digests.

    They are those of the source's folder, if there is one with weights; it may not be another model's. Else they come
    from the cache, and what the cache lacks is pulled.

    Parameters
    ----------
    base : as the set-up described it, with the source on this machine
    cache : folder for files that are pulled; None: none is
    address : of the server's service before round 1; None: nothing can be pulled
    certificates : this machine's own

    Raises
    ------
    ValueError
        If a file is missing or another one and cannot be pulled, or the disk is full; the message names it.
    """
    if cache is None or base.files_are_there or weight_folder(base.source) is not None:
        return base.check()
    cached = base.by_digest(cache)
    missing = [file for file in cached.files if not _is_whole(cache / file.name, file)]
    if missing and address is None:
        # Names the folder that was expected.
        return base.check()
    if missing and address is not None:
        durable.make_folders(cache)
        with WeightPull(address, certificates) as pull, _alone(cache):
            for file in missing:
                pull.complete(cache, file)
    return cached.check()


def _is_whole(path: Path, file: BaseFile) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes and durable.checked_digest(path) == file.sha256


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Wait until no other process pulls into a cache: two control units of a machine need each file once.

    Raises
    ------
    ValueError
        If another one holds the cache and nothing has come for :data:`STILL_S`.
    """
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        held_bytes, until = -1, 0.0
        while not _is_locked(descriptor):
            if (now_bytes := sum(_size(path) for path in cache.glob("*"))) != held_bytes:
                held_bytes, until = now_bytes, time.monotonic() + STILL_S
            if time.monotonic() > until:
                raise ValueError(
                    f"model.pretrained: another control unit holds {cache}, and nothing has come there for {STILL_S:g} "
                    "s; end it, and start the run again"
                )
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Take the lock of a folder; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class WeightPull:
    """Fetches files of frozen weights, piece by piece.

    Parameters
    ----------
    address : of the server's service before round 1; its ``cluster`` is the number by which the set-up knows this node
    certificates : this machine's own
    """

    def __init__(self, address: DecoderAddress, certificates: LinkCertificates) -> None:
        self._address = address
        # Nothing larger is received, whatever is sent.
        self._piece_bytes = min(PULLED_BYTES, address.max_frame_bytes // 2)
        self._channel = open_channel(address, certificates, 2 * self._piece_bytes)
        self._call = self._channel.unary_unary(
            f"/{SERVICE}/{WEIGHTS_METHOD}", request_serializer=None, response_deserializer=None
        )

    def __enter__(self) -> WeightPull:
        """Return this."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close the channel."""
        self._channel.close()

    def complete(self, cache: Path, file: BaseFile) -> Path:
        """Have a file in the cache, whatever of it is there already.

        Parameters
        ----------
        cache : folder
        file : named by its digest

        Raises
        ------
        ValueError
            If the server refuses or stays away, sends something else, or the disk is full. What has come stays, and the
            next try goes on behind it, unless it is not of this file.
        """
        path, partial = cache / file.name, cache / f"{file.sha256}.partial"
        if _is_whole(path, file):
            return path
        held_bytes = _size(partial)
        if held_bytes > file.num_bytes:
            held_bytes = 0
            durable.disk.remove(partial)
        self._fetch(partial, file)
        if held_bytes and durable.file_digest(partial) != file.sha256:
            # Of a machine that failed, what was written last may be lost: once more, from the start.
            durable.disk.remove(partial)
            self._fetch(partial, file)
        if (digest := durable.file_digest(partial)) != file.sha256:
            durable.disk.remove(partial)
            raise ValueError(
                f"{self._where(file)}: all {file.num_bytes} bytes have SHA-256 {digest[:14]}, expected "
                f"{file.sha256[:14]}, as the set-up says: the server's file has changed since; start the run again"
            )
        durable.disk.sync(partial)
        durable.disk.rename(partial, path)
        durable.disk.sync(cache)
        return path

    def _fetch(self, partial: Path, file: BaseFile) -> None:
        held_bytes = _size(partial)
        free_bytes = shutil.disk_usage(partial.parent).free
        if free_bytes < file.num_bytes - held_bytes:
            raise self._full(partial, file, f"{free_bytes} bytes are free")
        while held_bytes < file.num_bytes:
            data = self._piece(file, held_bytes, min(self._piece_bytes, file.num_bytes - held_bytes))
            try:
                durable.disk.append(partial, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise self._full(partial, file, str(error.strerror)) from error
            held_bytes += len(data)

    def _piece(self, file: BaseFile, offset: int, size: int) -> bytes:
        place = {"token": self._address.token, "node": self._address.cluster}
        frame = encode({"kind": "pull", "sha256": file.sha256, "offset": offset, "size": size, **place})
        until, tries = time.monotonic() + _PATIENCE_S, 0
        while True:
            try:
                data: bytes = self._call(frame, timeout=_PIECE_S)
                break
            except grpc.RpcError as error:
                call = cast(grpc.Call, error)
                pause_s = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                if call.code() in _PASSING and time.monotonic() + pause_s < until:
                    tries += 1
                    time.sleep(pause_s)
                    continue
                raise ValueError(
                    f"{self._where(file)}: {offset} of {file.num_bytes} bytes are here, then "
                    f"{call.code().name.lower().replace('_', ' ')}: {call.details()}; start the run again, it goes on "
                    "from there, or copy the model's folder to this machine"
                ) from None
        if len(data) != size:
            raise ValueError(f"{self._where(file)}: expected {size} bytes at {offset}, found {len(data)}")
        return data

    def _full(self, partial: Path, file: BaseFile, reason: str) -> ValueError:
        return ValueError(
            f"{self._where(file)}: the disk of {partial.parent} is full: {_size(partial)} of {file.num_bytes} bytes "
            f"are here, {reason}; make room and start the run again, it goes on from there"
        )

    def _where(self, file: BaseFile) -> str:
        return f"model.pretrained: pulling {file.name[:14]}... from {self._address.target}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0

"""Digest of a Flower app's files, the same for every copy of a release on every machine.

Flower's own hash is of the packed bytes, which differ from one release of zlib to another.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flower_app.launch.app_folder import assemble_app

MAX_UNPACKED_BYTES = 64 * 2**20


def app_digest(bundle: bytes) -> str:
    """SHA-256 over names and contents of an app bundle's files, hexadecimal.

    Raises
    ------
    ValueError
        If the bundle is no archive, holds a file twice, or more than 64 MiB.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            files = sorted(archive.infolist(), key=lambda file: file.filename)
            names = [file.filename for file in files]
            if len(set(names)) < len(names):
                raise ValueError("app bundle: expected each file once, found one twice")
            if (size := sum(file.file_size for file in files)) > MAX_UNPACKED_BYTES:
                raise ValueError(f"app bundle: expected at most {MAX_UNPACKED_BYTES} bytes unpacked, found {size}")
            digest = hashlib.sha256()
            for file in files:
                digest.update(hashlib.sha256(file.filename.encode()).digest())
                digest.update(hashlib.sha256(archive.read(file)).digest())
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"app bundle: expected a zip archive, found something else ({error})") from error
    return digest.hexdigest()


def release_digest() -> str:
    """Return the digest of the app that is installed here, as ``collapipe run`` submits it."""
    from strategies.flower_internals import build_fab_from_disk

    with tempfile.TemporaryDirectory(prefix="collapipe-") as folder:
        return app_digest(build_fab_from_disk(assemble_app(Path(folder) / "app")))


def installed_digest() -> str:
    """Return :func:`release_digest` from a process of its own, for one that should not hold Flower in memory.

    Raises
    ------
    RuntimeError
        If it fails, with what it printed.
    """
    command = [sys.executable, "-P", "-m", __name__]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"no digest of the installed app: {process.stderr.strip()}")
    return process.stdout.split()[-1]


if __name__ == "__main__":
    print(release_digest())

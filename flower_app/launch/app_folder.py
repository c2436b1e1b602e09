"""The Flower app as a folder of its own, as ``flwr run`` and ``flwr build`` want it.

A repository holds much that is no part of the app (an environment, past runs), and an installed wheel is no app
folder at all; so each run assembles one from the packages that are installed.
"""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("client_pipeline", "strategies", "flower_app", "configs")
SUFFIXES = (".py", ".toml")
"""What the app is made of. Other kinds of files may not ship in a bundle."""
BESIDE = ("LICENSE", "README.md")
"""What lies beside ``pyproject.toml``: a bundle must have its licence, and the Flower Hub shows the other."""
_DIGESTS = ".info"
"""Folder of a bundle with the digests of its files."""
SERVER, CLIENT = "flower_app.server_app:app", "flower_app.client_app:app"
"""The components of ``pyproject.toml``."""


def assemble_app(folder: Path, *, server: str = SERVER, client: str = CLIENT) -> Path:
    """Copy the app's packages and its ``pyproject.toml`` into ``folder``.

    Parameters
    ----------
    folder : made, with its parents; must not hold an app yet
    server, client : the app's components, ``module:name``

    Returns
    -------
    ``folder``
    """
    root = _root()
    folder.mkdir(parents=True, exist_ok=True)
    project_path = project_file(root)
    project = project_path.read_text(encoding="utf-8")
    for name in BESIDE:
        shutil.copyfile(project_path.with_name(name), folder / name)
    for component, wanted in ((SERVER, server), (CLIENT, client)):
        project = project.replace(f'"{component}"', f'"{wanted}"')
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    for place in _sources(root):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / place, folder / place)
    return folder


def link_app(bundle: bytes, folder: Path) -> bool:
    """Make the folder of a bundled app out of links to the packages that are installed here, if it is made of them.

    Parameters
    ----------
    bundle : archive as ``flwr build`` makes it
    folder : made, with its parents; must not be there yet

    Returns
    -------
    Whether it was made: every file of the app's packages must be as it is here.

    Raises
    ------
    OSError, zipfile.BadZipFile
        If the file system has no links, or the bundle is no archive.
    """
    root, sources = _root(), {place.as_posix() for place in _sources(_root())}
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        files = {file.filename: file for file in archive.infolist() if file.filename.partition("/")[0] != _DIGESTS}
        beside = [name for name in files if "/" not in name]
        if files.keys() - beside != sources:
            return False
        # Sizes first: nothing is unpacked that is larger than what is here.
        if any(files[name].file_size != (root / name).stat().st_size for name in sources):
            return False
        if any(archive.read(files[name]) != (root / name).read_bytes() for name in sources):
            return False
        # Whoever finds it finds all of it.
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        for name in beside:
            (partial / name).write_bytes(archive.read(files[name]))
    for package in PACKAGES:
        (partial / package).symlink_to(root / package, target_is_directory=True)
    partial.rename(folder)
    return True


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _sources(root: Path) -> Iterator[Path]:
    """Files of the app's packages, relative to the folder that they are in."""
    for package in PACKAGES:
        for source in sorted((root / package).rglob("*")):
            place = source.relative_to(root)
            if source.suffix in SUFFIXES and place.parts[:2] != ("configs", "app"):
                yield place


def project_file(root: Path | None = None) -> Path:
    """Find the app's ``pyproject.toml``: a wheel has it inside ``configs``, a checkout beside the packages."""
    root = _root() if root is None else root
    for candidate in (root / "configs" / "app" / "pyproject.toml", root / "pyproject.toml"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{root}: found no pyproject.toml of the app; install the package again")

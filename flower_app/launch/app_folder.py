"""The Flower app as a folder of its own, as ``flwr run`` and ``flwr build`` want it.

A repository holds much that is no part of the app (an environment, past runs), and an installed wheel is no app
folder at all; so each run assembles one from the packages that are installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

PACKAGES = ("client_pipeline", "strategies", "flower_app", "configs")
SUFFIXES = (".py", ".toml")
"""Kinds of files in the app. Others may not ship in a bundle."""
BESIDE = ("LICENSE", "README.md")
"""Files beside ``pyproject.toml``: a bundle must have its licence, and the Flower Hub shows the README."""
SERVER, CLIENT = "flower_app.server_app:app", "flower_app.client_app:app"
"""The components of ``pyproject.toml``."""


def assemble_app(folder: Path, *, server: str = SERVER, client: str = CLIENT) -> Path:
    """Copy the app's packages and its ``pyproject.toml`` into ``folder``.

    Parameters
    ----------
    folder : made, with its parents; must not hold an app yet
    server, client : the app's components, ``module:name``
    """
    root = Path(__file__).resolve().parents[2]
    folder.mkdir(parents=True, exist_ok=True)
    project_path = project_file()
    project = project_path.read_text(encoding="utf-8")
    for name in BESIDE:
        shutil.copyfile(project_path.with_name(name), folder / name)
    for component, wanted in ((SERVER, server), (CLIENT, client)):
        project = project.replace(f'"{component}"', f'"{wanted}"')
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    for package in PACKAGES:
        for source in sorted((root / package).rglob("*")):
            place = source.relative_to(root)
            if source.suffix in SUFFIXES and place.parts[:2] != ("configs", "app"):
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, folder / place)
    return folder


def project_file(root: Path | None = None) -> Path:
    """Find the app's ``pyproject.toml``: a wheel has it inside ``configs``, a checkout beside the packages."""
    root = Path(__file__).resolve().parents[2] if root is None else root
    for candidate in (root / "configs" / "app" / "pyproject.toml", root / "pyproject.toml"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{root}: found no pyproject.toml of the app; install the package again")

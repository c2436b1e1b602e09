"""The container's lock file on 64-bit ARM: every release that it names has a wheel there, nothing is compiled."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from helpers.repository import ROOT

LOCK = ROOT / "deploy" / "requirements.lock"
SOURCES = {"seqeval"}
"""Packages without a wheel on any machine: pure Python, which nothing has to be compiled for."""
NO_NETWORK = ("error sending request", "dns error", "failed to fetch", "could not connect", "tcp connect", "timed out")


def pins():
    lines = [line.split(" ")[0] for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line[:80]]
    # "+cpu" is what another index than PyPI calls the release without a GPU's libraries.
    return [line.replace("+cpu", "") for line in lines if not line.startswith(("#", " "))]


def resolved(tmp_path, requirements):
    """Resolve for ARM by wheels alone; returns releases, or what is in the way."""
    program = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    if program is None:
        pytest.skip("uv is not installed here")
    (tmp_path / "pins.txt").write_text("\n".join(requirements) + "\n")
    platform = ("--python-version", "3.11", "--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:")
    command = (program, "pip", "compile", tmp_path / "pins.txt", "--no-deps", *platform, "--no-header", "--no-annotate")
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    words = done.stderr.lower()
    if done.returncode and any(sign in words for sign in NO_NETWORK):
        pytest.skip("no package index can be reached")
    return set(done.stdout.split()) if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_every_release_of_the_lock_has_a_wheel_for_64_bit_arm(tmp_path):
    wanted = [pin for pin in pins() if pin.split("==")[0] not in SOURCES]
    assert len(wanted) > 100 and len(wanted) == len(pins()) - len(SOURCES)
    releases = resolved(tmp_path, wanted)
    assert isinstance(releases, set), releases
    assert len(releases) == len(wanted) and {pin.lower() for pin in releases} == {pin.lower() for pin in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_what_is_installed_from_source_is_pure_python(tmp_path, name):
    (pin,) = (pin for pin in pins() if pin.startswith(f"{name}=="))
    assert "has no" in (said := resolved(tmp_path, [pin])) and "wheel" in said
    installed = Path(sysconfig.get_path("purelib")) / name
    assert installed.is_dir() and not list(installed.rglob("*.so"))

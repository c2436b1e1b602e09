"""Contents of the container and of the repository: packages by hash, and no secret."""

import re
import subprocess
import tomllib
from importlib import metadata

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text(encoding="utf-8")
ENVIRONMENT = default_environment() | {"python_version": "3.11", "python_full_version": "3.11.9", "extra": ""}
SECRETS = [
    "certs/cu-0/cu.key",
    "deploy/certs/server/server.key",
    "collapipe-state/superlink.db",
    "certs/authority/ca.key",
]


def locked():
    """Version of each package in the lock file, by its name; every one has a hash."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", "\n" + re.sub(r"(?m)^#.*\n", "", LOCK))
    pins = {}
    for entry in filter(None, map(str.strip, entries)):
        pin, _, hashes = entry.partition(" \\\n")
        name, version = pin.split("==")
        assert re.fullmatch(r"(\s*--hash=sha256:[0-9a-f]{64}( \\\n)?)+", hashes), pin
        pins[canonicalize_name(name)] = version
    return pins


def unmet(requirements, pins, extra=""):
    """Those of some requirements that the lock file does not meet."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate(ENVIRONMENT | {"extra": extra}):
            continue
        version = pins.get(canonicalize_name(wanted.name))
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            yield f"{text}: locked {version}"


def test_the_lock_file_meets_what_the_project_wants():
    pins = locked()
    assert list(unmet(PROJECT["dependencies"], pins)) == []
    # With an extra come further ones, which the installed package tells of its own version.
    for text in PROJECT["dependencies"]:
        wanted = Requirement(text)
        for extra in wanted.extras if metadata.version(wanted.name) == pins[wanted.name] else ():
            assert list(unmet(metadata.requires(wanted.name) or (), pins, extra)) == []
    assert pins["torch"].endswith("+cpu") and not any("nvidia" in name for name in pins)


def test_the_lock_file_is_whole():
    """Whatever a locked package wants, is locked: pip refuses the rest under --require-hashes."""
    pins = locked()
    for name, version in pins.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version == version:
            assert list(unmet(installed.requires or (), pins)) == [], name


def test_no_package_hosts_name_is_in_the_lock_file():
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", LOCK)


def test_every_dependency_has_an_upper_bound():
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["tensorboard"], *extras["privacy"]]:
        assert any(part.operator in ("<", "<=", "==", "~=") for part in Requirement(text).specifier), text


def test_the_image_is_built_from_the_lock_file():
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (image,) = re.findall(r"^FROM python:(\d+\.\d+)-slim$", text, re.MULTILINE)
    assert image == ENVIRONMENT["python_version"]
    assert "--require-hashes" in text and "--no-deps" in text
    # What it copies, Docker is sent.
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert {f"!{word}" for word in copied} <= set(sent) and "*" in sent


def test_nothing_else_is_sent_to_docker():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:].split("/")[0] for rule in rules if rule.startswith("!")}
    assert not let_in & {path.split("/")[0] for path in SECRETS if not path.startswith("deploy/")}
    assert [rule for rule in rules if rule.startswith("!deploy")] == ["!deploy/requirements.lock"]


@pytest.mark.slow
@pytest.mark.parametrize("path", SECRETS)
def test_secrets_are_not_added_to_the_repository(path):
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    asked = subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT, check=False)
    assert asked.returncode == 0

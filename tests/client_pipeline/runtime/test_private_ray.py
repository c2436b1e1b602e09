"""A Ray for one program: its settings, the folder of its sockets, and a process that has imported Ray too early."""

import http.server
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import ray

from client_pipeline.runtime.ray.private_ray import (
    RAY_INTERNALS,
    RAY_SETTINGS,
    TOKEN_BYTES,
    prepare_private_ray,
    private_environment,
    private_ray,
    without_secrets,
)
from client_pipeline.runtime.ray.ray_folder import short_folder
from helpers.repository import ROOT

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", LOOPBACK)


def test_names_of_ray_that_are_not_public_are_few_and_stand_in_the_table():
    used = set()
    for folder in ("client_pipeline", "strategies", "flower_app"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"\bray\._\w+\.\w+", text)) | set(re.findall(r"__ray_\w+__", text))
            for module, names in re.findall(r"from (ray\._[\w.]+) import (.+)", text):
                used |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert {name for name in used if not any(known.startswith(name) for known in RAY_INTERNALS)} == set()
    assert len(RAY_INTERNALS) <= 8 and all("superfluous" in reason for reason in RAY_INTERNALS.values())


def test_each_ray_has_a_secret_of_its_own_and_the_loopback():
    one, other = private_environment(), private_environment()
    assert one["RAY_AUTH_MODE"] == "token" and one[LOOPBACK] == "0"
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert len(bytes.fromhex(one["RAY_AUTH_TOKEN"])) == TOKEN_BYTES


def test_the_settings_of_another_ray_are_dropped_and_nothing_else():
    inherited = dict.fromkeys(NAMES, "x") | {"PATH": "/bin"}
    assert without_secrets(inherited) == {"PATH": "/bin"}


def test_a_process_that_is_prepared_keeps_its_secret():
    before = dict(os.environ)
    prepare_private_ray()
    assert os.environ == before


def test_a_process_is_prepared_without_the_settings_of_another_ray(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN_PATH": "of another", "PATH": "/bin"})
    monkeypatch.delitem(sys.modules, "ray")
    prepare_private_ray()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert (os.environ["RAY_AUTH_MODE"], os.environ["PATH"]) == ("token", "/bin")


def test_the_environment_may_change_the_settings_of_ray(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RAY_worker_niceness": "5"})
    monkeypatch.delitem(sys.modules, "ray")
    prepare_private_ray()
    assert {name: os.environ[name] for name in RAY_SETTINGS} == RAY_SETTINGS | {"RAY_worker_niceness": "5"}


def test_a_process_that_imported_ray_before_it_had_a_secret_starts_none(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert ray is not None
    with pytest.raises(RuntimeError, match=r"prepare_private_ray\(\) at the program's start"), private_ray():
        pass


@pytest.mark.parametrize(("length", "is_taken"), [(10, True), (20, True), (21, False), (60, False)])
def test_ray_lies_where_its_sockets_have_room(monkeypatch, length, is_taken):
    """`collapipe verify` ended in a traceback where the path of TMPDIR was long."""
    folder = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(os, "access", lambda *arguments: True)
    assert short_folder() == (folder if is_taken else "/tmp")


STARTED = """
import glob, os, sys
from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray
prepare_private_ray()
import ray
with private_ray(num_cpus=3, namespace="n"):
    with private_ray():
        pass
    print(ray.cluster_resources()["CPU"], ray.get_runtime_context().namespace)
    print(ray.get_runtime_context().gcs_address)
    print(ray.get(ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"]).remote()) == os.environ["RAY_AUTH_TOKEN"])
    print(ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))
    (folder,) = glob.glob(os.environ["TMPDIR"] + "/collapipe-*")
    print(folder, oct(os.stat(folder).st_mode))
print(ray.is_initialized())
"""


@pytest.fixture
def short_tmp():
    """A folder for temporary files that leaves Ray room for its sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_program_starts_one_ray_on_the_loopback_and_ends_it(tmp_path, short_tmp):
    # A folder of this name had its mode changed, wherever a link led.
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (short_tmp / "ray").symlink_to(precious)
    environment = without_secrets(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {
        "TMPDIR": str(short_tmp),
        "RAY_ADDRESS": "10.1.2.3:6379",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "of another Ray"),
    }
    done = subprocess.run([sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    size, address, has_secret, niceness, folder, is_left = done.stdout.split("\n")[:6]
    assert size == "3.0 n" and address.startswith("127.0.0.1:") and has_secret == "True" and is_left == "False"
    assert niceness == "0"
    # Ray's folder was in one that is closed to all others.
    assert folder.startswith(f"{short_tmp}/collapipe-") and folder.endswith(" 0o40700")
    assert os.listdir(short_tmp) == ["ray"] and precious.stat().st_mode & 0o777 == 0o700 and not os.listdir(precious)


ASKING = """
import sys, time
from pathlib import Path
from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray
prepare_private_ray()
with private_ray(_temp_dir=sys.argv[1]):
    # The dashboard's line after it has asked.
    log = Path(sys.argv[1]) / "session_latest" / "logs" / "dashboard.log"
    while not (log.is_file() and "Usage reporting is" in log.read_text()):
        time.sleep(0.2)
    print(log.read_text())
"""


@pytest.mark.slow
def test_ray_asks_the_users_proxy_for_nothing(recording_proxy):
    """Its dashboard asked for a cloud's metadata, at each start, though its reports were off."""
    url, asked = recording_proxy
    environment = without_secrets(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run([sys.executable, "-c", ASKING, folder], env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert b"Usage reporting is disabled" in done.stdout and asked == []


@pytest.fixture
def recording_proxy():
    """An HTTP proxy's URL, and the addresses that it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(502)

        do_POST = do_CONNECT = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()

"""A message's process is a fork of one that has the libraries: its own, and like a fresh one in all that matters."""

import io
import json
import os
import subprocess
import sys
import zipfile
from types import ModuleType

import pytest

from flower_app.deployment import superexec_program
from flower_app.deployment.app_digest import app_digest
from flower_app.deployment.superexec_program import CLIENT_APP, ForkServer, install_app

CHILD = """
import json, os, random, signal, sys
from flower_app.deployment.superexec_program import serve_forks

def load():
    import numpy, strategies.flower_internals
    random.random(), numpy.random.random()
    def run():
        ours = [name for name in sys.modules if name.startswith(("flower_app", "strategies", "client_pipeline"))]
        signals = [signal.getsignal(number) is not signal.SIG_IGN for number in (signal.SIGINT, signal.SIGCHLD)]
        seen = [os.getpid(), os.getppid(), sys.argv, random.random(), numpy.random.random(), ours, signals]
        os.write(1, (json.dumps(seen) + "\\n").encode())
        if sys.argv[1] == "bad":
            raise SystemExit(7)
    return run

serve_forks(int(sys.argv[1]), load)
"""


@pytest.mark.slow
def test_each_order_gets_a_process_of_its_own_with_modules_and_random_numbers_of_its_own():
    read, write = os.pipe()
    command = [sys.executable, "-c", CHILD, str(read)]
    process = subprocess.Popen(command, pass_fds=[read], stdout=subprocess.PIPE, text=True)
    os.close(read)
    with open(write, "w", encoding="utf-8") as orders:
        for arguments in (["--token", "a b"], ["bad"], ["--token", "c"]):
            print(json.dumps(arguments), file=orders)
    # It ends with the pipe; what a message's process says of itself is no failure of its.
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    seen = sorted(map(json.loads, out.splitlines()), key=lambda row: row[0])
    assert [row[2] for row in seen] == [[CLIENT_APP, *rest] for rest in (["--token", "a b"], ["bad"], ["--token", "c"])]
    assert len({row[0] for row in seen} | {process.pid}) == 4
    for place in (3, 4):
        assert len({row[place] for row in seen}) == 3
    assert all(ours == [] and signals == [True, True] for *_, ours, signals in seen)


def test_a_client_app_comes_from_there_and_all_else_as_flower_would_start_it(monkeypatch):
    started = []
    monkeypatch.setattr(
        superexec_program.subprocess, "Popen", lambda command, **named: started.append((command, named))
    )
    read, write = os.pipe()
    place = ForkServer(write)
    place.start([CLIENT_APP, "--token", "secret"])
    place.start(["flwr-serverapp", "--token", "x"])
    place.start([CLIENT_APP, "--token", "y"], stdout=subprocess.DEVNULL)
    assert os.read(read, 1000).decode() == json.dumps(["--token", "secret"]) + "\n"
    assert started == [
        (["flwr-serverapp", "--token", "x"], {}),
        ([CLIENT_APP, "--token", "y"], {"stdout": subprocess.DEVNULL}),
    ]
    # The process has ended: Flower's own way is left.
    os.close(read)
    place.start([CLIENT_APP, "--token", "z"])
    assert started[2:] == [([CLIENT_APP, "--token", "z"], {})]


@pytest.mark.slow
def test_the_installed_flower_starts_client_apps_by_what_is_replaced():
    """The program is Flower's, with what it starts client apps by in place of Flower's own."""
    script = (
        "from flower_app.deployment import superexec_program\n"
        "from flower_app.deployment.bell import Bell\n"
        "from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor\n"
        "from flwr.supercore.constant import TaskType\n"
        "superexec_program.serve_forks = lambda read, load: print(open(read).read())\n"
        "spec = dict(runtime_api_address='127.0.0.1:1', token='secret', insecure=True, root_certificates_path=None,\n"
        "    runtime_dependency_install=False, parent_pid=5, task_id=1, suppress_output=False)\n"
        "def superexec():\n"
        "    SubprocessExecutor().launch(ExecutionSpec(task_type=TaskType.CLIENT_APP, **spec))\n"
        "superexec_program.load_superexec(superexec, 'digest', Bell(), Bell())()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for part in ("--runtime-api-address", "127.0.0.1:1", "--token", "secret", "--insecure", "--parent-pid"):
        assert part in done.stdout, done.stdout


@pytest.mark.parametrize("sent", ["this release", "another release", "no archive"])
def test_the_app_of_this_release_is_imported_already_and_every_other_one_brings_its_own(monkeypatch, sent):
    bundles = {name: _bundle(name) for name in ("this release", "another release")} | {"no archive": b"PK"}
    release, module, installed = app_digest(bundles["this release"]), ModuleType("flower_app.mine"), []
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def install(bundle, **options):
        installed.append((bundle, options, sys.modules.get("flower_app.mine")))
        return "place"

    assert install_app(install, release, {"flower_app.mine": module}, bundles[sent], skip_prompt=True) == "place"
    assert installed == [(bundles[sent], {"skip_prompt": True}, module if sent == "this release" else None)]


def _bundle(text):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("flower_app/client_app.py", text)
    return file.getvalue()


@pytest.mark.slow
def test_a_message_s_process_neither_imports_nor_unpacks_again_the_app_of_this_release(tmp_path):
    """In a process of its own, with the app as the server sends it and Flower's own way of loading it."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flower_app.deployment.app_digest import app_digest\n"
        "from flower_app.deployment.bell import Bell\n"
        "from flower_app.deployment.superexec_program import load_client_app\n"
        "from flower_app.launch.app_folder import assemble_app\n"
        "from flwr.supercore.object_ref import load_app\n"
        "from strategies.flower_internals import build_fab_from_disk, run_clientapp_module as flower\n"
        "unpack, unpacked = flower.install_from_fab, []\n"
        "flower.install_from_fab = lambda *given, **more: unpacked.append(1) or unpack(*given, **more)\n"
        "bundle = build_fab_from_disk(assemble_app(Path(sys.argv[1]) / 'app'))\n"
        "answers = Bell()\n"
        "flower.push_message = lambda *given: print(given, answers.wait(0.0))\n"
        "load_client_app(app_digest(bundle), answers)\n"
        "flower.push_message('an', 'answer')\n"
        "print(answers.wait(0.0))\n"
        "for name in [name for name in sys.modules if name.startswith(('flower_app', 'strategies', 'client_pipe'))]:\n"
        "    del sys.modules[name]\n"
        "places = {flower.install_from_fab(bundle, skip_prompt=True) for _ in range(3)}\n"
        "before = set(sys.modules)\n"
        "app = load_app('flower_app.client_app:app', ValueError, min(places))\n"
        "print(type(app).__name__, sorted(set(sys.modules) - before), len(places), unpacked)\n"
    )
    environment = os.environ | {"FLWR_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    lines = done.stdout.splitlines()
    assert lines[-1] == "ClientApp [] 1 [1]", done.stderr
    # Whoever waits for an answer is told of it afterwards.
    assert lines[lines.index("('an', 'answer') False") + 1] == "True"

"""Flower's programs of a simulation are forks that wait with their libraries: they become what they are sent, once."""

import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from client_pipeline.runtime.worker_forks import FORKS_SOCKET
from flower_app.launch.simulation_superlink import SIMULATION, SimulationOrder, begin_at_word, run_alone
from flower_app.launch.submit import GO
from flower_app.launch.waiting_program import show_as

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each is a program of its own"),
]

CHILD = """
import json, os, subprocess, sys, time
from flower_app.launch.waiting_program import WaitingProgram

loaded, loads = os.pipe()

def load():
    os.write(loads, b"x")
    def run():
        # One write each, so that two programs' lines stay apart.
        os.write(1, (json.dumps([os.getpid(), os.getsid(0), sys.argv]) + "\\n").encode())
        os.write(2, b"said\\n")
        time.sleep(float(sys.argv[2]))
    return run

program = WaitingProgram("baker", load)
SILENT = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


OWN_PROCESS = """
try:
    program.start(["baker", "-", "0"])
except FileNotFoundError:
    print(True)
"""


def run_python(script, *arguments, check=True, **options):
    """Run a script in a process of its own, which writes its lines when it prints them."""
    command = [sys.executable, "-u", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=check, **options)


def run_script(script, **options):
    """Run a script that has the program which waits."""
    return run_python(CHILD + script, "a", "command", "line", "that", "is", "long", "enough", **options)


def test_a_fork_becomes_the_program_that_it_is_sent_with_its_output_and_a_session_of_its_own():
    done = run_script(
        # It has made ready what it needs before anybody sends it anything.
        "assert os.read(loaded, 1)\n"
        "made = program.start(['baker', '--token', '0'], start_new_session=True)\n"
        "made.wait(30)\n"
        "print(json.dumps([made.pid, os.getsid(0)]))\n"
    )
    (pid, session, arguments), (started, parents_session) = map(json.loads, done.stdout.splitlines())
    assert pid == started and session == pid != parents_session
    assert arguments == ["baker", "--token", "0"] and done.stderr == "said\n"


def test_one_without_output_says_nothing():
    done = run_script("program.start(['baker', '--token', '0'], **SILENT).wait(30)\n")
    assert (done.stdout, done.stderr) == ("", "")


def test_the_systems_tools_show_its_name_and_its_environment_and_no_arguments():
    script = (
        "import psutil\n"
        "made = program.start(['baker', '--token', '20'], **SILENT)\n"
        "seen = psutil.Process(made.pid)\n"
        "while 'baker' not in seen.cmdline(): time.sleep(0.02)\n"
        "print(' '.join(seen.cmdline()).strip(), seen.environ()['MARK'])\n"
        "made.terminate()\n"
        "made.wait(30)\n"
    )
    done = run_script(script, env=os.environ | {"MARK": "here"})
    assert done.stdout.splitlines()[-1] == "baker here"


@pytest.mark.parametrize(
    "first",
    [
        "program.start(['baker', '-', '0']).wait(30)",
        "program.terminate(); program.wait(30)",
        "program.forget(); program.wait(30)",
    ],
    ids=["started", "killed", "given up"],
)
def test_what_it_cannot_start_is_started_as_flower_would(first):
    done = run_script(f"{first}\nprogram.start(['sh', '-c', 'echo baker $0', 'x']).wait()\n" + OWN_PROCESS)
    assert done.stdout.splitlines()[-2:] == ["baker x", "True"]


def test_a_long_wait_for_one_that_does_not_end_says_so():
    done = run_script(
        "made = program.start(['baker', '-', '30'], **SILENT)\n"
        "try:\n    made.wait(0.2)\n"
        "except subprocess.TimeoutExpired as error:\n    print(error.cmd)\n"
        "made.terminate()\nmade.wait(30)\n"
    )
    assert done.stdout.splitlines()[-1] == "baker"


def test_it_ends_without_having_been_anything_when_nobody_can_send_it_arguments_any_more():
    done = run_script("print(program.pid, flush=True)\nos._exit(0)\n")
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert done.stderr == ""


def test_a_simulation_waits_with_its_libraries_and_without_a_module_of_ours_or_a_way_to_them():
    script = (
        "import sys\n"
        "from flower_app.launch.simulation_superlink import SimulationOrder, load_simulation\n"
        "sys.path.insert(0, '/ours')\n"
        "order = SimulationOrder(folder='', modules=['colorsys', 'no_such_module'], config='')\n"
        "run = load_simulation(order, folder='/ours').args[1]\n"
        "assert '/ours' not in sys.path\n"
        "ours = [name for name in sys.modules if name.startswith(('flower_app', 'strategies', 'client_pipeline'))]\n"
        "print(run.__module__, ours, [name in sys.modules for name in ('torch', 'ray', 'colorsys')])\n"
    )
    done = run_python(script)
    assert done.stdout.splitlines()[-1] == "flwr.simulation.app [] [True, True, True]"


@pytest.mark.parametrize(("sent", "unpacked"), [("this release", []), ("another", [1])])
def test_a_simulation_neither_unpacks_nor_imports_an_app_of_this_release(tmp_path, sent, unpacked):
    """With the app as the SuperLink sends it, and Flower's own way of loading it."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from flower_app.launch.app_folder import assemble_app\n"
        "from flower_app.launch.simulation_superlink import SimulationOrder, load_simulation\n"
        "from flwr.supercore.object_ref import load_app\n"
        "from strategies.flower_internals import build_fab_from_disk, simulation_module as flower\n"
        "unpack, unpacked = flower.install_from_fab, []\n"
        "flower.install_from_fab = lambda *given, **more: unpacked.append(1) or unpack(*given, **more)\n"
        "folder = assemble_app(Path(sys.argv[1]) / 'app')\n"
        "if sys.argv[2] == 'another':\n"
        "    (folder / 'flower_app' / 'server_app.py').write_text('app = 1')\n"
        "bundle = build_fab_from_disk(folder)\n"
        "load_simulation(SimulationOrder(folder='', modules=[], config=''))\n"
        "place = flower.install_from_fab(bundle, skip_prompt=True)\n"
        "before = set(sys.modules)\n"
        "app = load_app('flower_app.server_app:app', ValueError, place)\n"
        "print(type(app).__name__, sorted(set(sys.modules) - before), unpacked)\n"
        "import flower_app\n"
        "print(Path(flower_app.__file__).is_relative_to(sys.argv[1]))\n"
    )
    done = run_python(script, str(tmp_path), sent, env=os.environ | {"FLWR_HOME": str(tmp_path)})
    expected = "ServerApp []" if sent == "this release" else "int ['flower_app', 'flower_app.server_app']"
    assert done.stdout.splitlines()[-2:] == [f"{expected} {unpacked}", str(sent == "another")]


@pytest.mark.parametrize(("shown", "is_written"), [("", 0), ("0 0", 0), ("no numbers", 0), ("4096 4200", 1)])
def test_where_the_system_does_not_say_where_a_command_line_lies_nothing_is_written(monkeypatch, shown, is_written):
    fields, written = " ".join(["7"] * 45), []
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"1 (a) name) {fields} {shown}")
    for name in ("memset", "memmove"):
        monkeypatch.setattr(ctypes, name, lambda *place: written.append(place))
    show_as("baker")
    assert written == is_written * [(4096, 0, 104), (4096, b"baker", 5)]


def test_the_installed_flower_starts_both_by_what_is_replaced():
    script = (
        "import json, subprocess, sys\n"
        "from types import SimpleNamespace\n"
        "from strategies.flower_internals import flower_superlink_module as flower, subprocess_executor_module as own\n"
        "from flwr.supercore.superexec.executor import ExecutionSpec\n"
        "from flwr.supercore.constant import TaskType\n"
        "def start(command, **options):\n    print(json.dumps([command[0], options == SILENT, sorted(options)]))\n"
        "SILENT = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "own.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)\n"
        "flower.subprocess = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)\n"
        "spec = dict(runtime_api_address='127.0.0.1:1', token='secret', insecure=True, root_certificates_path=None,\n"
        "    runtime_dependency_install=False, parent_pid=5, task_id=1, suppress_output=True)\n"
        "own.SubprocessExecutor().launch(ExecutionSpec(task_type=TaskType.SIMULATION, **spec))\n"
        "config = dict(isolation='subprocess', host='127.0.0.1', port=1, certificates=None, ssl_ca_certfile=None,\n"
        "    runtime_dependency_install=False)\n"
        "lifespan = SimpleNamespace(config=SimpleNamespace(**config))\n"
        "flower.SuperLinkLifespan._start_superexec_if_needed(lifespan)\n"
    )
    done = run_python(script)
    rows = [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    assert rows == [[SIMULATION, True, ["stderr", "stdout"]], ["flower-superexec", False, ["start_new_session"]]]


def test_the_installed_flower_waits_between_two_questions_as_it_is_told():
    script = (
        "import os\n"
        "from types import SimpleNamespace\n"
        "from strategies.flower_internals import superexec_loop_module as loop\n"
        "from flwr.proto.runtime_pb2 import AcquireTaskResponse\n"
        "os.environ['FLWR_SUPEREXEC_TASK_POLL_INTERVAL'] = '0.25'\n"
        "client = SimpleNamespace(AcquireTask=lambda request: AcquireTaskResponse(), close=lambda: None)\n"
        "loop.RuntimeHttpClient = SimpleNamespace(from_server_address=lambda **options: client)\n"
        "def sleep(seconds):\n    raise SystemExit(f'waits {seconds}')\n"
        "loop.time = SimpleNamespace(sleep=sleep)\n"
        "loop.run_superexec('127.0.0.1:1', insecure=True)\n"
    )
    done = run_python(script, check=False)
    assert done.stderr.splitlines()[-1] == "waits 0.25"


def test_a_simulations_superexec_asks_seldom_once_the_simulation_has_started():
    done = run_script(
        "from flower_app.launch import simulation_superlink as ours\n"
        "ours.time = type('', (), {'sleep': print})\n"
        "ours.pause(program, 0.1)\n"
        # Two that wrote at the same time could share a line.
        "program.start(['baker', '-', '0']).wait(60)\n"
        "ours.pause(program, 0.1)\n"
    )
    first, _, last = done.stdout.splitlines()
    assert (first, last) == ("0.1", "10.0")


SUPERLINK = """
import os, sys
from types import SimpleNamespace
from flower_app.launch import simulation_superlink as ours
from strategies import flower_internals

is_shown = sys.argv.pop() == "shown"
ours.can_show_as = lambda: is_shown
ours.show_as = lambda title: None

def waiting(name, load):
    # Started at once, but for the simulation.
    if name == ours.SUPEREXEC and os.fork() == 0:
        load()()
        os._exit(0)
    return SimpleNamespace(start=None, forget=lambda: None)

def serve():
    print("serves")
    try:
        os.wait()
    except ChildProcessError:
        pass

ours.WaitingProgram = waiting
flower_internals.flower_superexec = lambda: print("asks for work")
flower_internals.flower_superlink_module.flower_superlink = serve
ours.main()
"""


@pytest.mark.parametrize("system", ["shown", "hidden"])
@pytest.mark.parametrize(("word", "asks"), [(GO, ["asks for work"]), (b"", [])])
def test_a_superexec_asks_for_work_when_the_launcher_says_so_and_not_before(tmp_path, system, word, asks):
    """What it has taken would be taken for dead if it waited for longer than half a minute."""
    heard, says = os.pipe()
    checked, answers = os.pipe()
    words = os.open(tmp_path / "words", os.O_WRONLY | os.O_CREAT)
    order = SimulationOrder(folder=str(tmp_path), modules=[], config="", word=heard, check=answers, check_words=words)
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", SUPERLINK, json.dumps(asdict(order)), system],
        env=os.environ | {FORKS_SOCKET: str(tmp_path / "forks")},
        pass_fds=[heard, answers, words],
        stdout=subprocess.PIPE,
        text=True,
    )
    with program, open(checked, "rb") as answer, open(says, "wb") as launcher:
        for descriptor in (heard, answers, words):
            os.close(descriptor)
        # Nobody makes the check here, and that is noticed before the word is given.
        assert answer.read() == b""
        assert program.stdout.readline() == "serves\n"
        time.sleep(0.3)
        assert program.poll() is None
        launcher.write(word)
        launcher.close()
        assert program.communicate(timeout=60)[0].splitlines() == asks


def test_a_word_lets_it_begin_and_a_launcher_that_is_gone_does_not():
    def begun(said):
        heard, says = os.pipe()
        with open(says, "wb") as launcher:
            launcher.write(said)
        return begin_at_word(heard, lambda: "begun")

    assert begun(GO) == begin_at_word(None, lambda: "begun") == "begun"
    with pytest.raises(SystemExit, match="does not let the app begin"):
        begun(b"")


def test_a_simulation_leaves_no_dead_process_of_its_check():
    checks = subprocess.Popen([sys.executable, "-c", ""])
    assert run_alone(checks.pid, lambda: "run") == run_alone(None, lambda: "run") == "run"
    with pytest.raises(ChildProcessError):
        os.waitpid(checks.pid, 0)


CHECK = """
import os
from multiprocessing import Pipe
import tomli_w
from flower_app.config.run_config import nested
from flower_app.config.sources import load_config
from flower_app.launch.simulation_superlink import fork_check
from flower_app.launch import run_check
check_run = run_check._check
run_check._check = lambda config: print("said by the check") or check_run(config)
files = ["data.source=files", "data.train-source=no.en", "data.train-target=no.de", "data.test-source=no.en"]
with open("run.toml", "w") as file:
    file.write(tomli_w.dumps(nested(load_config(None, files).to_flat())))
for config in ("run.toml", "none.toml"):
    answer, end = Pipe(duplex=False)
    words = os.open("words", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    check = fork_check(config, os.dup(end.fileno()), words)
    end.close()
    print(answer.recv_bytes().decode())
    os.waitpid(check, 0)
"""


def test_a_fork_checks_the_run_and_says_what_it_found(tmp_path):
    done = run_python(CHECK, cwd=tmp_path)
    no_text, no_config = map(json.loads, done.stdout.splitlines())
    assert no_text["mistake"] == "ValueError" and no_text["text"].startswith("data.train-source: no file ")
    assert no_config["mistake"] == "FileNotFoundError" and "none.toml" in no_config["text"]
    # Neither of what it prints is lost nor in this program's output.
    assert (tmp_path / "words").read_text() == "said by the check\n"

"""Ray's workers are forks of one process: what a worker orders, who may, and what happens when that process is gone."""

import contextlib
import json
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

import numpy
import psutil
import pytest
import torch

from client_pipeline.runtime import worker_forks
from helpers.repository import ROOT

SERVER = """
import json, os, signal, sys
raylet = os.getppid()
from client_pipeline.runtime.worker_forks import listen, serve_workers
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
order = serve_workers(listen(sys.argv[1]), sys.argv[1], raylet)
if order is not None:
    print(json.dumps({**order, "parent": os.getppid()}), flush=True)
"""


@pytest.fixture
def server(tmp_path):
    """A server whose forks print what was ordered; yields socket and process."""
    path = str(tmp_path / "forks")
    with subprocess.Popen([sys.executable, "-c", SERVER, path]) as process:
        try:
            deadline = time.monotonic() + 60
            while not os.path.exists(path):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            yield path, process
        finally:
            process.kill()


def test_a_server_listens_beside_its_raylet_under_a_name_that_is_no_longer():
    path = worker_forks.socket_path(["--a=b", "--raylet-name=/tmp/ray/session_1/sockets/raylet.2"])
    assert path == "/tmp/ray/session_1/sockets/forks.2"
    assert worker_forks.socket_path(["--raylet-name=/tmp/other"]) == worker_forks.socket_path([]) == ""


def test_one_of_many_becomes_the_server_and_no_other_user_may_connect(tmp_path):
    path = str(tmp_path / "forks")
    server = worker_forks.listen(path)
    assert server is not None and worker_forks.listen(path) is None
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and os.listdir(tmp_path) == ["forks"]
    server.close()


def test_without_a_server_a_worker_is_told_so(tmp_path):
    assert not worker_forks.order_fork(str(tmp_path / "none"), [])
    worker_forks.listen(str(tmp_path / "gone")).close()
    with pytest.raises(ConnectionRefusedError):
        worker_forks.order_fork(str(tmp_path / "gone"), [])


def test_a_stranger_who_has_taken_the_name_is_told_nothing(tmp_path, monkeypatch):
    path = str(tmp_path / "forks")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not worker_forks.order_fork(path, [])
        reached, _ = stranger.accept()
        with reached:
            reached.settimeout(30)
            assert reached.recv(1) == b""


@pytest.mark.slow
def test_a_fork_has_the_environment_the_folder_the_arguments_and_the_output_of_who_ordered_it(server, tmp_path):
    path, process = server
    order = (
        "import sys; from client_pipeline.runtime.worker_forks import order_fork; "
        "sys.exit(not order_fork(sys.argv[1], sys.argv[2:]))"
    )
    environment = {**os.environ, "A_NAME": "its value"}
    asked = subprocess.run(
        [sys.executable, "-c", order, path, "a", "b c"],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answers = json.loads(asked.stdout)
    assert answers["arguments"] == ["a", "b c"] and answers["folder"] == str(tmp_path)
    assert answers["environment"]["A_NAME"] == "its value" and answers["parent"] == process.pid


def strange(kind):
    """What a stranger sends: head, files, content."""
    good = json.dumps({"arguments": [], "environment": {}, "folder": "/", "modules": [], "leads_group": False}).encode()
    return {
        "nothing": (b"", [0, 1, 2], b""),
        "no files": (struct.pack("!I", len(good)), [], good),
        "a false length": (struct.pack("!I", 0xFFFFFFFF), [0, 1, 2], good),
        "too short": (struct.pack("!I", len(good) + 1), [0, 1, 2], good),
        "no JSON": (struct.pack("!I", 4), [0, 1, 2], b"\xff{]["),
        "another thing": (struct.pack("!I", 2), [0, 1, 2], b"{}"),
        "a number": (struct.pack("!I", 1), [0, 1, 2], b"7"),
        "depth": (struct.pack("!I", 100_000), [0, 1, 2], b"[" * 100_000),
    }[kind]


KINDS = ["nothing", "no files", "a false length", "too short", "no JSON", "another thing", "a number", "depth"]


@pytest.mark.slow
def test_an_order_whose_process_is_gone_is_dropped(server, capfd):
    path, process = server
    with socket.socket(socket.AF_UNIX) as ordering:
        ordering.connect(path)
        process.send_signal(signal.SIGSTOP)
        content = json.dumps(worker_forks.order_of_this_process(["of the dead"])).encode()
        socket.send_fds(ordering, [struct.pack("!I", len(content))], [0, 1, 2])
        ordering.sendall(content)
    process.send_signal(signal.SIGCONT)
    assert worker_forks.order_fork(path, ["of the living"])
    process.kill()
    process.wait(60)
    deadline, output = time.monotonic() + 30, ""
    while "of the living" not in output:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        output += capfd.readouterr().out
    assert "of the dead" not in output


@pytest.mark.slow
def test_the_server_outlives_what_is_no_order_and_keeps_no_file_of_it(server):
    path, process = server
    before = psutil.Process(process.pid).num_fds()
    for kind in KINDS:
        head, files, content = strange(kind)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(30)
            stranger.connect(path)
            if head:
                socket.send_fds(stranger, [head], files)
                with contextlib.suppress(BrokenPipeError):
                    stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            # What was not read when the server left resets the connection.
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", kind
    # Who connects and says nothing holds nobody up for long.
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        assert worker_forks.order_fork(path, ["still there"])
    deadline = time.monotonic() + 30
    while psutil.Process(process.pid).num_fds() != before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_another_users_order_is_refused(tmp_path, monkeypatch):
    path = str(tmp_path / "forks")
    server = worker_forks.listen(path)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        worker, _ = server.accept()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with worker, pytest.raises(ValueError, match="may start nothing"):
            worker_forks._read_order(worker)
    server.close()


@pytest.mark.slow
def test_the_server_ends_when_its_raylet_has(tmp_path):
    path = str(tmp_path / "forks")
    raylet = (
        "import os, subprocess, sys, time\n"
        f"server = subprocess.Popen([sys.executable, '-c', {SERVER!r}, {path!r}], stdout=subprocess.DEVNULL)\n"
        f"while not os.path.exists({path!r}) and server.poll() is None: time.sleep(0.02)\n"
        "print(server.pid)"
    )
    out = subprocess.run([sys.executable, "-c", raylet], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    server = psutil.Process(int(out.stdout))
    server.wait(timeout=60)


TITLED = """
import os, sys
import numpy, torch
from client_pipeline.runtime import worker_forks

def run_worker(arguments):
    import ray
    ray._raylet.setproctitle("a title")
    with open("/proc/self/cmdline") as title:
        print(title.read().partition(chr(0))[0] == "a title", flush=True)
    os.execv(sys.executable, [sys.executable, "-c", "import os; print(os.environ.get('JOB'), os.environ['OTHER'])"])

worker_forks.run_worker = run_worker
for job in sys.argv[1:-1]:
    environment = {name: value for name, value in {**os.environ, "JOB": job, "OTHER": "9"}.items() if value}
    if os.fork() == 0:
        worker_forks.become_worker({**worker_forks.order_of_this_process([]), "environment": environment})
    os.wait()
"""
TITLED_JOBS = {"02": True, "3": True, "": False, "longer": False}
"""Whether a job has room where the job of the forks' parent stands."""


@pytest.fixture(scope="module")
def titled_forks():
    """What a fork for each of the jobs has printed: one process imports torch for all."""
    environment = {"JOB": "01", "OTHER": "8", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TITLED, *TITLED_JOBS, "words that leave room for a title"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    lines = iter(done.stdout.splitlines())
    return dict(zip(TITLED_JOBS, zip(lines, lines, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("job", "has_room"), TITLED_JOBS.items())
def test_a_fork_has_a_title_also_if_its_own_variable_is_the_first(job, has_room, titled_forks):
    """Ray puts the job's number into each worker's environment, where it may be the first."""
    has_title, variables = titled_forks[job]
    assert variables == f"{job or None} 9" and (has_title == "True" or not has_room)


def assert_script_ends_well(script):
    """Run a script in a process of its own, as a Ray of its own needs one."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert "all as it should be" in out.stdout, out.stdout + out.stderr


class Asked:
    """An actor that says who it is."""

    def says(self):
        numbers = random.random(), float(numpy.random.rand()), float(torch.rand(()))
        heaps, group = os.environ.get("MALLOC_ARENA_MAX"), os.getpgrp() == os.getpgid(os.getppid())
        app = os.environ.get("A_NAME", "none"), "/an/app" in sys.path
        return os.getpid(), os.getppid(), *numbers, heaps, group, app


RAY = """
import os, signal, sys, time
import psutil, ray
from client_pipeline.runtime.private_ray import private_ray
from test_worker_forks import Asked
with private_ray(num_cpus=2):
    def actors(number):
        made = [ray.remote(Asked).options(num_cpus=0).remote() for _ in range(number)]
        return made, ray.get([actor.says.remote() for actor in made], timeout=120)
    kept, answers = actors(4)
    parents = {parent for _, parent, *_ in answers}
    assert len(parents) == 1 and len({pid for pid, *_ in answers}) == 4, answers
    server = psutil.Process(parents.pop())
    assert any("worker_forks.py" in word for word in server.cmdline()) and server.num_threads() == 1, server
    # While a method is run, and for a moment after its answer, the title names the method, too.
    deadline = time.monotonic() + 30
    while (titles := {psutil.Process(pid).cmdline()[0] for pid, *_ in answers}) != {"ray::Asked"}:
        assert time.monotonic() < deadline, titles
        time.sleep(0.02)
    assert all(len({each[place] for each in answers}) == 4 for place in (2, 3, 4)), answers
    assert all((heaps, group) == ("1", True) for *_, heaps, group, _ in answers), answers
    # A worker that ends leaves nothing in the table of processes, and Ray starts another.
    os.kill(answers[0][0], signal.SIGKILL)
    more, later_answers = actors(1)
    assert later_answers[0][1] == server.pid
    assert not any(child.status() == psutil.STATUS_ZOMBIE for child in server.children())
    # Without the server another takes its place.
    server.kill()
    last, last_answers = actors(3)
    servers = {parent for _, parent, *_ in last_answers}
    assert len(servers) == 1 and servers != {server.pid}, last_answers
    assert ray.get(kept[1].says.remote(), timeout=60)[0] == answers[1][0]
print("all as it should be")
"""


@pytest.mark.slow
def test_rays_workers_are_forks_with_titles_and_random_numbers_of_their_own_also_when_the_server_is_gone():
    assert_script_ends_well(RAY)


JOBS = """
import ray
from client_pipeline.runtime.private_ray import private_ray
from test_worker_forks import Asked
import json, os, psutil, subprocess, sys, time
def agents():
    return [child.name() for child in psutil.Process().children(recursive=True) if "Agent" in child.name()]
with private_ray(num_cpus=2) as environment:
    made = ray.remote(Asked).options(num_cpus=0).remote()
    first = ray.get(made.says.remote(), timeout=120)
    assert agents() == []
    other = '''
import json, os, ray, sys
from test_worker_forks import Asked
path = "/an/app:" + os.environ["PYTHONPATH"]
options = dict(logging_level="ERROR", log_to_driver=False)
ray.init(address=sys.argv[1], runtime_env={"env_vars": {"PYTHONPATH": path}}, **options)
def says(**options):
    return ray.get(ray.remote(Asked).options(num_cpus=0, **options).remote().says.remote(), timeout=120)
of_job, of_its_own = says(), says(runtime_env={"env_vars": {"PYTHONPATH": path, "A_NAME": "its value"}})
print(json.dumps([of_job, of_its_own]))
'''
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", other, address]
    out = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    of_job, of_its_own = json.loads(out.stdout.splitlines()[-1])
    assert of_job[1] == first[1] and of_job[-1] == ["none", True], (first, of_job)
    # A library may have read the variable when it was imported: that worker imports its own.
    assert of_its_own[1] != first[1] and of_its_own[-1] == ["its value", True], (first, of_its_own)
    # Who makes environments has come with the first that asked for one; its name comes later.
    deadline = time.monotonic() + 60
    while (there := agents()) != ["ray::RuntimeEnvAgent"]:
        assert time.monotonic() < deadline, there
print("all as it should be")
"""


@pytest.mark.slow
def test_one_server_serves_all_jobs_also_with_an_environment_of_their_own_whose_agent_comes_then():
    assert_script_ends_well(JOBS)


def as_ray_says(*options, flags=(), **settings):
    context = "--serialized-runtime-env-context=" + json.dumps({"py_executable": sys.executable, **settings})
    return [*flags, sys.argv[0], "--raylet-name=r", context, "--language=PYTHON", *options]


@pytest.mark.parametrize("flags", [(), ("-s",)])
def test_the_module_path_of_an_environment_is_as_if_python_had_started_with_it(flags, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setattr(sys, "path", ["/before", "/library"])
    arguments = as_ray_says(
        "--runtime-env-hash=7", flags=flags, env_vars={"PYTHONPATH": "/app:/more"}, command_prefix=[]
    )
    assert worker_forks.take_environment(arguments) == ["--raylet-name=r", "--runtime-env-hash=7"]
    assert os.environ["PYTHONPATH"] == "/app:/more" and sys.path == ["/app", "/more", "/library"]
    # Without an environment there is nothing to set.
    assert worker_forks.take_environment([*flags, sys.argv[0], "--raylet-name=r"]) == ["--raylet-name=r"]
    assert sys.path == ["/app", "/more", "/library"]


@pytest.mark.parametrize(
    "settings",
    [
        {"py_executable": "/another/python"},
        {"command_prefix": ["cd /x &&"]},
        {"env_vars": {"HF_HUB_OFFLINE": "1"}},
        {"env_vars": {"PATH": "/x:${PATH}"}},
        {"env_vars": {"PYTHONPATH": "/x:${PYTHONPATH}"}},
        {"override_worker_entrypoint": "/x.py"},
    ],
)
def test_what_takes_more_is_left_to_rays_own_programs(settings, monkeypatch):
    class Replaced(BaseException):
        pass

    def exec_(program, command):
        raise Replaced(command)

    monkeypatch.setattr(os, "execv", exec_)
    environment, arguments = dict(os.environ), as_ray_says(flags=("-s",), **settings)
    with pytest.raises(Replaced) as replaced:
        worker_forks.take_environment(arguments)
    python, file, flag, worker, *rest = replaced.value.args[0]
    assert python == sys.executable and file.endswith("/ray/_private/workers/setup_worker.py") and flag == "-s"
    assert worker.endswith("/ray/_private/workers/default_worker.py") and rest == arguments[2:]
    assert os.path.exists(file) and os.path.exists(worker) and os.environ == environment


@pytest.mark.slow
def test_the_server_imports_nothing_of_rays_or_ours_and_has_one_thread():
    script = """
import os, sys
from client_pipeline.runtime import worker_forks
os.environ[worker_forks.IMPORTS] = "transformers.models.llama.modeling_llama,peft,no.such.module"
worker_forks._import_libraries()
assert not {"ray", "client_pipeline"} & sys.modules.keys(), sorted(sys.modules)
assert "OPENBLAS_NUM_THREADS" not in os.environ
assert {"torch", "peft", "transformers.models.llama.modeling_llama"} <= sys.modules.keys()
print(len(os.listdir("/proc/self/task")))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert out.stdout.split() == ["1"], out.stderr

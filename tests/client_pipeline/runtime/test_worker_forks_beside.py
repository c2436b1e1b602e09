"""Ray's workers are forks of a process that was there before this Ray, where whoever has started it names one."""

import subprocess
import sys

import pytest

from helpers.repository import ROOT

RAY = """
import os, resource, sys, time
from client_pipeline.runtime import worker_forks
from client_pipeline.runtime.worker_libraries import fork_server, import_libraries

path = os.environ[worker_forks.FORKS_SOCKET] = sys.argv[1]
is_kept = sys.argv[2] == "kept"
server = worker_forks.listen(path)
# Not this process, which starts Ray: what a worker is Ray reads when it is imported.
importer = os.fork()
if importer == 0:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    import_libraries(["pyclbr"])
    fork_server(server, path)
    time.sleep(600)
    os._exit(0)
server.close()
import psutil, ray
from client_pipeline.runtime.private_ray import private_ray

class Asked:
    def says(self):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)[0], open("/proc/self/oom_score_adj").read()
        assert sys.argv[0].endswith("default_worker.py") and worker_forks.FORKS_SOCKET not in os.environ
        return os.getppid(), "pyclbr" in sys.modules, limits

def answer(actor):
    return ray.get(actor.says.remote(), timeout=60)

try:
    with private_ray(num_cpus=2):
        make = ray.remote(Asked).options(num_cpus=0).remote
        first = make()
        parent, has_module, limits = answer(first)
        assert has_module and limits[0] > 512
        assert psutil.Process(parent).ppid() == importer
        # Another takes its place where it is gone, and where the process that it comes from is gone.
        psutil.Process(parent if is_kept else importer).kill()
        deadline = time.monotonic() + 60
        while psutil.pid_exists(parent) and psutil.Process(parent).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Some may have been waiting since before.
        later = [answer(actor) for actor in [make() for _ in range(4)]]
        imported_anew = {parent for parent, has_module, _ in later if not has_module}
        # What Ray has set for its workers they have, whoever they are forks of.
        assert {limits for *_, limits in later} == {limits}, (limits, later)
        assert len(imported_anew) == 1 and parent not in imported_anew, (parent, later)
        assert answer(first)[1]
finally:
    psutil.Process(importer).kill()
print("all as it should be")
"""


@pytest.mark.slow
@pytest.mark.parametrize("importer", ["kept", "gone"])
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker is a program of its own")
def test_workers_are_forks_of_a_server_that_is_there_and_of_another_when_it_is_gone(tmp_path, importer):
    command = [sys.executable, "-c", RAY, str(tmp_path / "forks"), importer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["all as it should be"], done.stderr

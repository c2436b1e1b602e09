"""Output of a healthy control unit's box: lines of ours, and none of the advice that Ray greets with."""

import shutil
import sys
from pathlib import Path

import pytest

from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.ray_node import RayNode
from helpers.joining import control_units
from helpers.running_programs import HOST, free_block, free_port

pytestmark = pytest.mark.slow

RAY = """
import socket, sys, time
print("Next steps\\n  To add another node to this Ray cluster, run\\n" * 10, flush=True)
print("Usage stats collection is disabled.", file=sys.stderr, flush=True)
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
time.sleep(300)
"""


def test_a_healthy_box_prints_no_advice_of_rays(tmp_path, monkeypatch, capfd):
    (files,) = control_units(tmp_path / "certs")
    port = free_block()
    monkeypatch.setattr(RayNode, "command", lambda node: [sys.executable, "-c", RAY, node.host, str(node.first_port)])
    monkeypatch.setattr(
        ControlUnitBox, "supernode_command", lambda *options: [sys.executable, "-c", "import time; time.sleep(300)"]
    )
    said = []
    box = ControlUnitBox(
        cluster=0,
        host=HOST,
        server=f"{HOST}:1",
        certs=files,
        state=tmp_path / "state",
        ray_port=port,
        runtime_port=free_port(),
        until=lambda: "the test is over",
    )
    assert box.up(said.append) == 1
    printed = capfd.readouterr()
    assert "Next steps" not in printed.out and "Usage stats" not in printed.err
    assert said[0] == f"Ray of cluster 0 at {HOST}:{port} is up" and said[2] == "SuperNode of cluster 0 is up"
    # The reason of a failure is found there.
    temp = Path(said[-1].removeprefix("logs of Ray: "))
    assert (temp / "ray.log").read_text().count("Next steps") == 10
    shutil.rmtree(temp)

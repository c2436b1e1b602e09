"""A real head of a cluster's Ray: it refuses strangers on all its ports, and a probe learns its versions."""

import os
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest

from client_pipeline.runtime.control_unit.ray_probe import probe
from client_pipeline.runtime.ray.ray_folder import short_folder
from flower_app.deployment.ray_node import RayNode, ray_environment
from flower_app.launch.superlink import flower_environment
from helpers.running_programs import free_block, running

HOST = "127.0.0.31"


def call_ray_client(port, token=""):
    """Status of a raw call of Ray Client's server."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            channel.unary_unary("/ray.rpc.RayletDriver/PrepRuntimeEnv")(b"", timeout=120, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


@pytest.mark.slow
def test_a_head_takes_nobody_without_its_secret_and_says_its_versions_to_who_has_it(tmp_path):
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("ab" * 32)
    other.write_text("cd" * 32)
    temp = Path(short_folder()) / f"collapipe-node-{os.getpid()}"
    node = RayNode(host=HOST, first_port=free_block(), object_store_mb=80, temp=temp)
    environment = ray_environment(flower_environment(temp / "flower"), token)
    assert environment["RAY_worker_niceness"] == "0"
    log = tmp_path / "head.log"
    try:
        with running(node.command(), environment, log, lambda: "Ray runtime started" in log.read_text()):
            port = node.services["ray-client-server-port"]
            assert call_ray_client(port) == call_ray_client(port, "0" * 64) == "UNAUTHENTICATED"
            assert call_ray_client(port, token.read_text()) != "UNAUTHENTICATED"
            address = f"{HOST}:{node.first_port}"
            assert probe(address, token=token) == {"ray": version("ray"), "python": platform.python_version()}
            assert "uthenticat" in probe(address, token=other)["error"]
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@pytest.mark.slow
def test_a_probe_of_an_address_without_a_ray_says_why():
    assert "error" in probe("127.0.0.1:1", timeout_s=60.0)
    assert probe("127.0.0.1:1", timeout_s=0.1) == {"error": "no answer within 0.1 s"}

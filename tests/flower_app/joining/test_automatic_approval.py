"""With --auto-approve nobody is asked to approve: neither by the box that joins, nor by the edge server."""

import pytest

from client_pipeline.link.hosts import HostPort
from flower_app.deployment.certificate_authority import read_certificate
from flower_app.joining.edge_joining import EdgeJoining
from flower_app.joining.join_code import JoinCode
from flower_app.joining.newcomer import BoxFolder, Wish, join_deployment
from flower_app.joining.registrar import approve_waiting
from flower_app.launch.superlink import flower_environment
from helpers.joining import JoiningThread, edge_server, waiting, wish
from helpers.running_programs import HOST, free_port, running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "auto_approve", "words"),
    [
        ("control-unit", True, "it is let in by its code"),
        ("device", True, "it is let in by its code, once its cluster has a control unit"),
        ("control-unit", False, "on the edge server: collapipe approve "),
    ],
)
def test_a_box_that_waits_says_what_it_waits_for(tmp_path, kind, auto_approve, words):
    joining = EdgeJoining(name=HOST, root=tmp_path / "certs", join_port=free_port(), auto_approve=auto_approve)
    joining.prepare()
    service = joining.programs(HOST, f"{HOST}:1")[0]
    code = JoinCode.new(HostPort(HOST, joining.join_port), read_certificate(joining.folder.authority.certificate))
    joining.folder.invite(code, 60.0)
    said, log = [], tmp_path / "service.log"
    wish = Wish(kind=kind, cluster=0, devices=(), host=HOST, ray_port=6379)
    with running(list(service.command), flower_environment(tmp_path / "flower"), log, service.answers):
        # The registrar, which approves, does not run.
        with pytest.raises(ValueError, match="nobody has approved"):
            join_deployment(BoxFolder(tmp_path / "box"), code, wish, 0.1, said.append)
    [line] = [line for line in said if line.startswith("this box is ")]
    assert words in line and ("collapipe approve" in line) is not auto_approve
    [asked] = [line for line in log.read_text().splitlines() if line.startswith("a box asks to join")]
    assert ("collapipe approve" in asked) is not auto_approve


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (wish("device", 0, devices=(0,)), "cluster 0 has a device 0 already; revoke its box first"),
        (wish("control-unit", 0), "cu-0 is another machine; collapipe revoke --cluster 0 takes its rights"),
        (wish("device", 3), "cluster 3 has no control unit that joined by a code yet"),
    ],
)
def test_the_edge_server_says_why_a_box_is_not_let_in_by_itself(tmp_path, asked, reason):
    """The box said "it is let in by its code" until its time was up, and the edge server nothing."""
    with edge_server(tmp_path / "certs") as server:
        for number, present in enumerate((wish(), wish("device", 0, devices=(0,)))):
            box = JoiningThread(tmp_path / f"present-{number}", server.code(), present)
            waiting(server)
            approve_waiting(server.folder, lambda _: None)
            assert box.done().error is None
        JoiningThread(tmp_path / "box", server.code(), asked)
        (box,) = waiting(server)
        words = []
        approve_waiting(server.folder, words.append)
    assert [line.partition(": ")[0] for line in words] == [f"{box.box_id} is not let in"] and reason in words[0]

"""The folders of a machine's programs: one that others have made or can fill costs its user nothing."""

import json
import os
import shutil
import threading

import pytest

from flower_app.deployment.sole_start import sole_start
from flower_app.joining.edge_joining import EdgeJoining
from flower_app.joining.join_folder import JoinFolder
from flower_app.joining.joined_box import JoiningBox

STRANGER = 4_321


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "collapipe-state"
    folder.mkdir()
    return folder


@pytest.fixture
def precious(tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir(mode=0o700)
    (folder / "thesis.tex").write_text("years of work")
    return folder


def started(state, say=print):
    """Start and end once; returns the folder for sockets."""
    with sole_start(state, "a mark of this test", say) as folder:
        assert json.loads((state / "running.json").read_text())["folder"] == str(folder) and folder.is_dir()
    return folder


def test_a_start_leaves_a_lock_alone(state):
    folder = started(state)
    assert not folder.exists() and os.listdir(state) == ["lock"]


@pytest.mark.parametrize("name", ["lock", "running.json"])
def test_a_link_in_it_is_refused_and_empties_no_file(state, precious, name):
    (state / name).symlink_to(precious / "thesis.tex")
    with pytest.raises(ValueError, match=f"{name}: expected a file of your own, found a link; remove it"):
        started(state)
    assert (precious / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["lock", "running.json"])
def test_a_pipe_in_it_is_refused_at_once(state, name):
    os.mkfifo(state / name)
    errors = []

    def attempt():
        try:
            started(state)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        os.close(os.open(state / name, os.O_RDWR | os.O_NONBLOCK))
    assert "found a pipe; remove it" in str(errors)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("name", ["", "lock", "running.json"])
def test_what_another_user_has_made_is_refused(state, name):
    if name:
        (state / name).touch()
    os.chown(state / name, STRANGER, STRANGER)
    with pytest.raises(ValueError, match=f"of your own, found one of user {STRANGER}"):
        started(state)


def test_a_link_in_the_folder_of_joining_boxes_empties_no_file(tmp_path, precious):
    folder = JoinFolder(tmp_path)
    folder.folder.mkdir()
    (folder.folder / "lock").symlink_to(precious / "thesis.tex")
    with pytest.raises(ValueError, match="lock: expected a file of your own, found a link"), folder.deciding():
        pass
    assert (precious / "thesis.tex").read_text() == "years of work"


USES = {
    "state": started,
    "joining": lambda folder: JoiningBox(code="no code", data=".", state=folder).join(print),
    "authority": lambda folder: EdgeJoining(name="127.0.0.1", root=folder).prepare(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_folder_in_which_others_can_write_is_refused(state, use):
    state.chmod(0o777)
    with pytest.raises(ValueError, match="collapipe-state: expected mode 700, found 777; .* chmod 700"):
        use(state)


def test_a_state_folder_may_lie_behind_a_link(state, tmp_path):
    (tmp_path / "by another name").symlink_to(state)
    assert not started(tmp_path / "by another name").exists()


@pytest.mark.parametrize("note", [b"", b"{", b"\xff", b"[]", b"{}", b'{"mark": "x", "folder": null}'])
def test_a_note_that_names_nothing_stops_no_start(state, note):
    """A full disk left an empty one, and every later start failed."""
    (state / "running.json").write_bytes(note)
    said = []
    started(state, said.append)
    assert len(said) == 1 and f"{state / 'running.json'}: expected the programs of the last start, found " in said[0]


def test_a_folder_that_no_start_has_made_is_not_removed(state, precious):
    for folder in (str(precious), f"{precious}\0"):
        (state / "running.json").write_text(json.dumps({"mark": "of no program", "folder": folder}))
        started(state)
    assert (precious / "thesis.tex").exists()


def test_a_start_that_has_removed_its_folder_leaves_no_note(state):
    with sole_start(state, "a mark of this test", print) as folder:
        shutil.rmtree(folder)
    assert os.listdir(state) == ["lock"]


def test_the_logs_of_a_failed_start_are_there_until_the_next_one(state):
    with sole_start(state, "a mark of this test", print) as folder:
        (folder / "ray.log").write_text("why it failed")
    assert (folder / "ray.log").exists()
    assert not started(state).exists() and not folder.exists() and os.listdir(state) == ["lock"]


def test_the_folder_of_a_killed_start_is_removed(state, tmp_path):
    left = tmp_path / "collapipe-0123abc_"
    left.mkdir(mode=0o700)
    (state / "running.json").write_text(json.dumps({"mark": "of no program", "folder": str(left)}))
    started(state)
    assert not left.exists()

"""A run follows no link, and waits at no pipe, that another user or a foreign run directory has put in its way."""

import contextlib
import os
import threading

import pytest

from client_pipeline import durable
from flower_app.config.run_config import RunConfig
from flower_app.launch.single_run import claim, continued_run
from flower_app.runs.listing import listed_runs
from flower_app.runs.run_directory import find_run, read_run_config, write_config
from flower_app.runs.run_lock import locked, nodes_held, serving
from flower_app.serving.boxes import order_boxes
from flower_app.serving.door_key import KEY_FILE, door_key

STRANGER = 4_321


def ended(call):
    """Run a call in a thread; return its error, or that it did not end. Pipes are opened afterwards."""
    errors = []

    def attempt():
        try:
            call()
        except (ValueError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(120)
    return not thread.is_alive(), errors


def hold(context):
    with context:
        pass


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, where anybody may write; the SuperLink's home is the user's own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def precious(tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return folder


def test_a_link_in_the_folder_for_temporary_files_costs_its_user_nothing(temporary, precious, tmp_path):
    """The end of every run deleted what such a link led to."""
    (temporary / f"collapipe-nodes-{os.getuid()}").symlink_to(precious)
    with nodes_held([7], tmp_path / "run"):
        pass
    assert (precious / "thesis.tex").exists() and os.listdir(precious) == ["thesis.tex"]


def test_a_pipe_in_the_folder_for_temporary_files_is_not_waited_at(temporary, tmp_path):
    planted = temporary / f"collapipe-nodes-{os.getuid()}"
    planted.mkdir()
    os.mkfifo(planted / "8")
    came_back, errors = ended(lambda: hold(nodes_held([7], tmp_path / "run")))
    if not came_back:
        os.close(os.open(planted / "8", os.O_RDONLY | os.O_NONBLOCK))
    assert came_back and not errors


def test_a_run_leaves_nothing_in_the_folder_for_temporary_files(temporary, tmp_path):
    with nodes_held([7, 8], tmp_path / "run"):
        assert not list(temporary.iterdir())
    # One that was killed is cleaned up after by the next, and others may not look in.
    folders = [path for path in (tmp_path / "home").rglob("*") if path.is_dir()]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700]
    assert not list(folders[0].iterdir())


@pytest.mark.parametrize("plant", ["link", "writable"])
def test_a_folder_of_locks_that_others_could_fill_is_refused(temporary, precious, tmp_path, plant):
    folder = tmp_path / "home" / "collapipe-nodes"
    folder.parent.mkdir()
    if plant == "link":
        folder.symlink_to(precious)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ValueError, match="collapipe-nodes: expected"), nodes_held([7], tmp_path / "run"):
        pass
    assert os.listdir(precious) == ["thesis.tex"]


@pytest.mark.parametrize("lock", [".lock", ".server-lock"])
@pytest.mark.parametrize("hold_by", [locked, serving])
def test_a_lock_that_is_a_link_empties_no_file(tmp_path, precious, lock, hold_by):
    """``--resume`` of a run directory from elsewhere emptied the file that its ``.lock`` led to."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / lock).symlink_to(precious / "thesis.tex")
    with contextlib.suppress(ValueError), hold_by(run_dir):
        pass
    assert (precious / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("lock", [".lock", ".server-lock"])
def test_a_lock_that_is_a_pipe_is_refused_at_once(tmp_path, lock):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.mkfifo(run_dir / lock)
    came_back, errors = ended(lambda: hold(locked(run_dir)))
    if not came_back:
        os.close(os.open(run_dir / lock, os.O_RDWR | os.O_NONBLOCK))
    assert came_back and f"{run_dir / lock}: expected a file of your own, found a pipe; remove it" in str(errors)


def foreign_run(tmp_path):
    run_dir = tmp_path / "runs" / "theirs"
    for folder in ("logs", "plans", "clusters", "checkpoint"):
        (run_dir / folder).mkdir(parents=True)
    write_config(run_dir, RunConfig(run_dir=str(run_dir)))
    return run_dir


@pytest.mark.parametrize(
    "name", [".lock", "rounds.jsonl", "logs", "logs/simulation.log", "flower", "clusters/cluster-0", "model", "plans"]
)
def test_a_run_directory_with_links_is_not_continued(tmp_path, precious, name):
    run_dir = foreign_run(tmp_path)
    if (run_dir / name).is_dir():
        (run_dir / name).rmdir()
    is_file = "." in name
    (run_dir / name).symlink_to(precious / "thesis.tex" if is_file else precious)
    with pytest.raises((ValueError, OSError)) as refused:
        continued_run(str(run_dir))
    assert str(refused.value) == f"{run_dir / name}: expected a file or a folder of your own, found a link; remove it"
    assert (precious / "thesis.tex").read_text() == "years of work"


def test_the_link_to_a_runs_own_model_is_no_foreign_one(tmp_path):
    run_dir = foreign_run(tmp_path)
    (run_dir / "models" / "round-000001").mkdir(parents=True)
    (run_dir / "model").symlink_to("models/round-000001")
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        continued_run(str(run_dir))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("name", ["config.toml", ".lock", "logs"])
def test_a_run_directory_of_another_user_is_not_continued(tmp_path, name):
    run_dir = foreign_run(tmp_path)
    (run_dir / ".lock").touch()
    os.chown(run_dir / name, STRANGER, STRANGER)
    with pytest.raises((ValueError, OSError)) as refused:
        continued_run(str(run_dir))
    assert f"{name}: expected a file or a folder of your own, found one of user {STRANGER}" in str(refused.value)


def test_a_run_with_a_foreign_lock_hides_no_other_in_the_list(tmp_path, precious):
    run_dir = foreign_run(tmp_path)
    (run_dir / ".server-lock").symlink_to(precious / "thesis.tex")
    assert [run.name for run in listed_runs(tmp_path / "runs")] == ["theirs"]


def test_a_directory_that_the_user_names_has_no_links_either(tmp_path, precious):
    run_dir = tmp_path / "named"
    run_dir.mkdir()
    (run_dir / "rounds.jsonl").symlink_to(precious / "thesis.tex")
    with pytest.raises((ValueError, OSError)) as refused:
        claim(RunConfig(run_dir=str(run_dir)))
    assert "rounds.jsonl: expected a file or a folder of your own, found a link; remove it" in str(refused.value)


def test_a_name_aside_cannot_be_guessed(tmp_path, precious):
    """Links at the next names would have led what was written aside to a file of the user's."""
    for number in range(1_000):
        (tmp_path / f".report.html.aside-{os.getpid()}-{number}").symlink_to(precious / "thesis.tex")
    durable.write_text(tmp_path / "report.html", "report", lasting=False)
    assert (precious / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("plant", ["pipe", "device", "ring"])
@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "summary.json", "logs/a.log", "checkpoint/x", "models/round-000001-1/task.json"]
)
def test_what_never_ends_in_a_run_directory_is_refused(tmp_path, name, plant):
    """`report` waited at a pipe of a stranger's, and read a link to /dev/zero until memory was full."""
    run_dir = tmp_path / "runs" / "theirs"
    run_dir.mkdir(parents=True)
    write_config(run_dir, RunConfig())
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    if plant == "pipe":
        os.mkfifo(run_dir / name)
    else:
        (run_dir / name).symlink_to("/dev/null" if plant == "device" else run_dir / name)
    try:
        find_run(run_dir)
    except ValueError as error:
        assert name in str(error) and "expected a file or folder" in str(error)
    else:
        pytest.fail("taken")
    (listed,) = listed_runs(tmp_path / "runs")
    assert listed.status == "unreadable"


def test_a_linked_folder_is_looked_at_once_and_the_programs_own_one_never(tmp_path):
    run_dir = foreign_run(tmp_path)
    (run_dir / "flower").mkdir()
    os.mkfifo(run_dir / "flower" / "socket")
    (run_dir / "logs" / "up").symlink_to(run_dir)
    assert find_run(run_dir) == run_dir
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(elsewhere / "pipe")
    (run_dir / "logs" / "more").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="logs/more/pipe: expected a file or folder, found a pipe"):
        find_run(run_dir)


@pytest.mark.parametrize("plant", ["link", "pipe", "writable"])
def test_a_door_takes_no_key_that_another_can_have_put_there(tmp_path, plant):
    """The planter of the file knows its key, and `serve` said that it was told before."""
    (tmp_path / "theirs").mkdir()
    _, digest = door_key(tmp_path / "theirs", new=False)
    path = tmp_path / "run" / KEY_FILE
    path.parent.mkdir()
    if plant == "link":
        path.symlink_to(tmp_path / "theirs" / KEY_FILE)
    elif plant == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(digest.hex())
        path.chmod(0o666)
    with pytest.raises(ValueError, match=f"{KEY_FILE}: expected a file (of your own|that its owner alone can write)"):
        door_key(path.parent, new=False)
    assert door_key(path.parent, new=True)[0] and door_key(path.parent, new=False) != ("", digest)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_door_takes_no_key_of_another_user(tmp_path):
    door_key(tmp_path, new=False)
    os.chown(tmp_path / KEY_FILE, STRANGER, STRANGER)
    with pytest.raises(ValueError, match=f"expected a file of your own, found one of user {STRANGER}"):
        door_key(tmp_path, new=False)


def test_the_order_to_boxes_follows_no_link(tmp_path, precious):
    """`serve --superlink` of a foreign run wrote its order where the link `serve` led."""
    run_dir = foreign_run(tmp_path)
    (run_dir / "serve").symlink_to(precious)
    with pytest.raises(ValueError, match="serve: expected a file or a folder of your own, found a link; remove it"):
        order_boxes(run_dir, read_run_config(run_dir), "now", None, print)
    assert os.listdir(precious) == ["thesis.tex"]

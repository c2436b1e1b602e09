"""The programs of one machine are started in order and end together, whoever ends first."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flower_app.deployment.programs import wait_until_listens
from flower_app.deployment.sole_start import sole_start
from flower_app.launch.processes import is_alive
from helpers.patience import eventually
from helpers.signals import default_signals

pytestmark = pytest.mark.slow

BOX = """
import os, sys
from pathlib import Path
from flower_app.deployment import programs, sole_start
from flower_app.launch.processes import MARK

folder = Path(sys.argv[1])
programs._AGAIN_S = 0.1

def program(name, code, **more):
    started = folder / f"{{name}}.pid"
    begin = f"import os, pathlib, time\\nmine = pathlib.Path({{str(started)!r}})\\nmine.write_text(str(os.getpid()))\\n"
    more.setdefault("answers", started.is_file)
    return programs.Program(name=name, command=[sys.executable, "-c", begin + code], **more)

{body}
environment = {{**os.environ, MARK: f"programs-{{os.getpid()}}"}}
with sole_start.sole_start(folder, environment[MARK], print):
    sys.exit(programs.run_programs(given, environment, folder / "work", lambda text: print(text, flush=True)))
"""
SLEEP = "time.sleep(300)"


@pytest.fixture
def box(tmp_path):
    """Start a box in a process of its own, for signals are its business."""
    started = []

    def start(body):
        code = BOX.format(body=textwrap.dedent(body))
        command = [sys.executable, "-c", code, tmp_path]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=default_signals)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def deaf_shell():
    """Ignore the terminal's signals, as programs in the background of a shell do."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pid(tmp_path, name):
    file = tmp_path / f"{name}.pid"
    return int(eventually(lambda: file.is_file() and file.read_text()))


def said_until(child, words):
    lines = []
    for line in child.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(lines)


def test_a_program_that_ends_takes_the_others_with_it(box, tmp_path):
    child = box(f'given = [program("first", "{SLEEP}"), program("second", "{SLEEP}")]')
    assert [line for line in said_until(child, "second is up") if "is up" in line] == [
        "first is up\n",
        "second is up\n",
    ]
    os.kill(pid(tmp_path, "second"), signal.SIGKILL)
    said = child.stdout.read()
    assert child.wait(120) == 1 and "error: second ended with exit code -9" in said
    assert not is_alive(pid(tmp_path, "first"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_box_that_is_told_to_end_leaves_nobody_behind(box, tmp_path, number, deaf_shell):
    # A child of its own in another session, as Flower and Ray start them.
    grandchild = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], "
        "start_new_session=True); mine.with_name('grandchild.pid').write_text(str(child.pid)); time.sleep(300)"
    )
    child = box(f'given = [program("first", {grandchild!r})]')
    said_until(child, "first is up")
    ended = [pid(tmp_path, "first"), pid(tmp_path, "grandchild")]
    child.send_signal(number)
    assert child.wait(120) == 0
    assert not any(is_alive(process) for process in ended)


def test_the_next_start_ends_what_a_killed_one_left(box, tmp_path):
    # Another session, and a program that ignores SIGTERM.
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True); "
        "mine.with_name('grandchild.pid').write_text(str(child.pid)); time.sleep(300)"
    )
    child = box(f'given = [program("first", {code!r})]')
    said_until(child, "first is up")
    left = [pid(tmp_path, "first"), pid(tmp_path, "grandchild")]
    folder = Path(json.loads((tmp_path / "running.json").read_text())["folder"])
    with (
        pytest.raises(ValueError, match="--state: .* which another collapipe uses"),
        sole_start(tmp_path, "another", print),
    ):
        pass
    child.kill()
    child.wait(120)
    assert all(is_alive(process) for process in left) and folder.is_dir()
    with sole_start(tmp_path, "another", print):
        assert not any(is_alive(process) for process in left) and not folder.exists()


def test_a_program_that_ends_early_is_started_again_for_a_while(box, tmp_path):
    # The second time it stays.
    code = "seen = mine.with_name('seen'); first = not seen.exists(); seen.touch(); time.sleep(2 if first else 300)"
    options = 'answers=(folder / "seen").is_file, again_s=60.0'
    child = box(f'given = [program("late", {code!r}, {options})]')
    said_until(child, "late is up")
    said_until(child, "late ended with exit code 0; it is started again")
    said_until(child, "late is up")
    child.send_signal(signal.SIGTERM)
    assert child.wait(120) == 0 and not is_alive(pid(tmp_path, "late"))


def test_a_program_that_ends_before_it_answers_is_told(box):
    child = box('given = [program("short", "raise SystemExit(3)", answers=lambda: False), program("never", "")]')
    said = child.stdout.read()
    assert child.wait(120) == 1
    assert "error: short ended with exit code 3, before short answered" in said and "never" not in said


def test_words_of_a_program_with_a_log_go_there_and_the_last_of_them_are_said_when_it_ends(box, tmp_path):
    code = "print('advice\\n' * 30 + 'out of memory', flush=True)\nraise SystemExit(3)"
    child = box(f'given = [program("ray", {code!r}, answers=lambda: False, log=folder / "ray.log")]')
    said = child.stdout.read()
    assert child.wait(120) == 1
    assert f"before ray answered; its own words are in {tmp_path / 'ray.log'}:" in said
    assert said.count("advice") == 19 and said.splitlines()[-1] == "out of memory"
    assert (tmp_path / "ray.log").read_text().count("advice") == 30


def test_a_program_that_does_not_answer_is_given_up(box, tmp_path):
    child = box(f'programs.READY_S = 1.0\ngiven = [program("mute", "{SLEEP}", answers=lambda: False)]')
    said = child.stdout.read()
    assert child.wait(120) == 1 and "error: mute does not answer within 1 s" in said
    assert not is_alive(pid(tmp_path, "mute"))


def test_waiting_for_another_machine_has_a_bound():
    with pytest.raises(ValueError, match=r"nobody answers at 127\.0\.0\.1:1 within 0 s; start it first"):
        wait_until_listens("127.0.0.1", 1, 0.0, "start it first")

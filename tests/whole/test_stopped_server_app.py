"""A deployed server app that stands still: the terminal and the control units say so, and nobody waits for ever."""

import os
import signal
import time

import psutil
import pytest

from flower_app.deployment.deployed_run import DECODER_PORT, JOIN_TIMEOUT_S
from flower_app.launch.stopped_process import GIVE_UP_S
from flower_app.runs.run_directory import read_rounds, read_summary
from flower_app.runs.run_lock import server_process
from helpers.deployed_stack import PATIENCE_S
from helpers.hosts import Loopback
from helpers.lost_machines import lone_stack
from helpers.patience import eventually
from strategies.decoder.config import DecoderConfig

pytestmark = pytest.mark.slow


class Server:
    """The server app of a run on this machine."""

    def __init__(self, stack, run_dir):
        self.stack, self.run_dir = stack, run_dir

    @property
    def process(self):
        return server_process(self.run_dir)

    def until(self, enough):
        eventually(enough, PATIENCE_S, self.stack.said, poll_s=0.1)

    def until_more_rounds(self, count):
        """Wait until it has finished more rounds than now."""
        before = len(read_rounds(self.run_dir)[0])
        self.until(lambda: len(read_rounds(self.run_dir)[0]) >= before + count)

    def stop_in_a_round(self):
        """Stop it while a control unit has a stream to its decoder."""

        def stops_with_a_stream():
            os.kill(self.process, signal.SIGSTOP)
            sockets = psutil.Process(self.process).net_connections("inet")
            if any(one.laddr.port == DECODER_PORT and one.status == psutil.CONN_ESTABLISHED for one in sockets):
                return True
            os.kill(self.process, signal.SIGCONT)
            return False

        self.until(stops_with_a_stream)


@pytest.mark.timeout(1800)
def test_a_server_app_that_stands_still_is_told_of_and_given_up(tmp_path):
    """Flower calls its run running, and its control units wait for gradients."""
    with Loopback(["server", "cu0"]) as hosts:
        stack = lone_stack(hosts, tmp_path, 1, 200)
        stack.start()
        run, run_dir = stack.begin(config=tmp_path / "server" / "run.toml")
        server = Server(stack, run_dir)
        server.until_more_rounds(1)

        # For a moment: the terminal says what is the matter, and the run goes on.
        server.stop_in_a_round()
        stopped = server.process
        words = (
            f"The server app (process {stopped}) is stopped. `kill -CONT {stopped}` lets it go on; after about a minute"
        )
        server.until(lambda: words in stack.log("run").read_text())
        os.kill(stopped, signal.SIGCONT)
        server.until_more_rounds(2)
        assert server.process == stopped and stack.log("run").read_text().count(words) == 1

        # For good: the SuperLink ends the run, whose command says why and what to do.
        heard = len(stack.log("cu0").read_text(errors="replace"))
        server.stop_in_a_round()
        stopped_at = time.monotonic()
        assert run.wait(PATIENCE_S) == 1
        hosts.running.remove(run)
        terminal = stack.log("run").read_text()
        assert terminal.count(words) == 2
        # Not by the command's own limit: it would have said for how long.
        assert f"error: the server app (process {stopped}) is stopped, and the SuperLink has ended its run" in terminal
        remedy = f"`kill -KILL {stopped}` ends it, and then collapipe run --resume {run_dir.name} --superlink ..."
        assert remedy in terminal

        # The control unit hears no answer to its keepalives, and none of its own limits has to end its round.
        stack.wait_for("cu0", "cluster 0): cannot be reached, or went away", since=heard)
        assert time.monotonic() - stopped_at < min(GIVE_UP_S, JOIN_TIMEOUT_S, DecoderConfig().step_timeout)

        # As long as it is there nobody else writes the directory.
        resume = stack.run_command("--resume", run_dir.name)
        refused = hosts.run("server", *resume, cwd=stack.folder, timeout=PATIENCE_S)
        assert refused.returncode == 2
        assert f"this run is still going (its server app is process {stopped})" in refused.stderr
        assert read_summary(run_dir) is None

        os.kill(stopped, signal.SIGKILL)
        server.until(lambda: server.process is None)
        run = hosts.start("server", *resume, log=stack.log("run"), cwd=stack.folder)
        server.until_more_rounds(1)
        run.send_signal(signal.SIGINT)
        run.wait(PATIENCE_S)
        hosts.running.remove(run)
        assert read_summary(run_dir)["status"] == "interrupted"

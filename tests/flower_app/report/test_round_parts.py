"""Parts of a round's wall seconds, and the local steps that follow from them."""

import io
import math

from rich.console import Console

from flower_app.config.run_config import RunConfig
from flower_app.launch.launcher import Outcome
from flower_app.launch.progress import RunProgress
from flower_app.launch.single_run import NewRun, launch_run
from flower_app.report.round_parts import round_parts
from flower_app.runs.run_directory import append_round, write_summary


def line(number, train_s=3.0, messages_s=14.0, round_s=15.0):
    reports = [{"cluster": 0, "prepare_s": 0.1, "train_s": 1.0, "collect_s": 0.1}]
    reports.append({"cluster": 1, "prepare_s": 0.5, "train_s": train_s, "collect_s": 0.5})
    return {"round": number, "train_loss": 1.0, "clusters": reports, "messages_s": messages_s, "round_s": round_s}


def test_the_slowest_cluster_counts_and_what_nobody_trained_in_is_messages_or_the_servers():
    assert round_parts(line(1)) == (3.0, 1.0, 10.0, 1.0)
    parts = round_parts({"round": 1, "messages_s": 4.0, "round_s": 5.0})
    assert math.isnan(parts.local_steps) and (parts.messages, parts.server) == (4.0, 1.0)


HINT = (
    "rounds: 15.0 s each (median): messages and waiting 10.0 s, local-steps = 4 took 3.0 s; "
    "with local-steps = 14 the same messages carry more training, averaged less often"
)


class Launcher:
    """Leaves three rounds."""

    def __init__(self, address):
        self.address = address

    def launch(self, order):
        for number in (1, 2, 3):
            append_round(order.run_dir, line(number))
        write_summary(order.run_dir, "finished", rounds=3)
        return Outcome("finished", "", {})


def test_the_hint_is_said_at_the_end_of_a_run_on_real_machines_and_of_no_simulation(tmp_path):
    for address, expected in (("10.0.0.1:9092", [HINT]), ("", [])):
        run_dir, said = tmp_path / (address or "here"), []
        (run_dir / "logs").mkdir(parents=True)
        progress = RunProgress(run_dir, 3, Console(file=io.StringIO()))
        launch_run(NewRun(run_dir, RunConfig(num_clusters=2)), said.append, Launcher(address), progress)
        assert [text for text in said if text.startswith("rounds:")] == expected

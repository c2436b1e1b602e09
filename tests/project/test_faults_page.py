"""Waits in docs/faults.md are those of the code."""

from client_pipeline.link import reopened_connection
from client_pipeline.runtime.control_unit import actors
from client_pipeline.runtime.fault_config import FaultConfig
from flower_app.launch import stopped_process
from helpers.repository import ROOT
from strategies.decoder import round as decoder_round
from strategies.decoder.config import DecoderConfig
from strategies.grid import reply_timeouts

PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_the_waits_of_the_page_are_those_of_the_code():
    for words in (
        f"after {reply_timeouts.BEGIN_S / 60:g} minutes without any sign of a cluster",
        f"`decoder.reply-timeout` ({DecoderConfig().reply_timeout:g} s)",
        "the next round begins when the first is back within three minutes",
        f"after {stopped_process.SAY_S:g} s the terminal names its process",
        f"a stopped simulation ends after {stopped_process.GIVE_UP_S:g} s",
    ):
        assert words in PAGE, words
    assert reply_timeouts.NOBODY_S == 180.0
    assert reply_timeouts._SLOWER == 5.0 and "five times the longest wait of the round" in PAGE
    # Sent again by Ray's control unit, and waited for by the last words of one that has left: "about a minute".
    assert reply_timeouts.LAST_WORDS_S == actors.YIELD_S == 60.0


def test_a_control_unit_that_is_killed_leaves_in_the_time_of_the_page():
    """The decoder waits for its stream, then the server for its last words; both look twice a second at least."""
    assert "| is killed while it trains | within 20 s |" in PAGE
    assert decoder_round.AWAY_S + reply_timeouts.LOST_S <= 20.0 - 1.0
    # Who gives up opening its stream again must not be waited for.
    assert FaultConfig().partition_seconds < reopened_connection.REOPEN_S < decoder_round.AWAY_S

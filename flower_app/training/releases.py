"""Ledger of what a round under way may release, written before it can, for a run that goes on where it died.

``releases.json`` is replaced when a round's orders go out, and whenever a step is begun again. It holds the state of
the accountant at that moment, and a bound on what the rest of that round releases beyond it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.run_identity import RunIdentity, sealed, unsealed
from flower_app.config.run_config import RunConfig
from strategies.aggregation.accountant import PrivacyAccountant, Sent
from strategies.checkpoint import Checkpoint
from strategies.decoder.service import DecoderService

_FILE = "releases.json"


class Releases:
    """The file of one run. Safe to call from several threads.

    Parameters
    ----------
    run_dir : directory of the run
    accountant : its state is kept
    sent : received amounts of each cluster; they go on changing
    examples : most that a cluster sends in a round, if it begins no step again
    length : most tokens of an example
    run : identity of the run; see :class:`~client_pipeline.run_identity.RunIdentity`
    """

    def __init__(
        self,
        run_dir: Path,
        accountant: PrivacyAccountant,
        sent: Mapping[int, Sent],
        examples: int,
        length: int,
        run: str = "",
    ) -> None:
        self._path = run_dir / _FILE
        self._run = run
        self._accountant, self._sent = accountant, sent
        self._examples, self._length = examples, length
        self._round: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin_round(self, round_: int, clusters: Collection[int]) -> None:
        """Note the clusters of a round before they are asked to train."""
        self._round = {"round": round_, "clusters": sorted(clusters)}
        self.keep()

    def keep(self) -> None:
        """Write the received amounts, before a step that was begun again is answered."""
        bound = {"examples": self._examples, "length": self._length}
        with self._lock:
            state = self._accountant.state(dict(self._sent))
            durable.write_text(self._path, sealed({"run": self._run, **self._round, **bound, **state}))


def most_examples(config: RunConfig) -> int:
    """Examples that a cluster trains on in a round."""
    return config.local_steps * config.batch_size * config.gradient_accumulation


def accounted(
    config: RunConfig,
    run_dir: Path,
    accountant: PrivacyAccountant,
    service: DecoderService | None,
    resumed: Checkpoint | None,
    identity: RunIdentity,
) -> Releases | None:
    """Go on from what was released, and keep what will be; None if there is no noise to account for."""
    if not accountant.on:
        return None
    sent: dict[int, Sent] = {}
    if resumed is not None:
        state = resumed.state["privacy"]
        sent = accountant.restore(state_after(run_dir, resumed.round, state, accountant.num_examples, identity.run))
    releases = Releases(run_dir, accountant, sent, most_examples(config), config.data.max_length, identity.run)
    if service is not None:
        service.account(sent, releases.keep)
    return releases


def state_after(
    run_dir: Path, completed: int, state: Mapping[str, Any], num_examples: Mapping[int, int], run: str = ""
) -> Any:
    """Return the accountant's state of a run that goes on.

    Parameters
    ----------
    run_dir : the run's
    completed : round of the checkpoint
    state : the accountant's in it
    num_examples : training examples of each cluster
    run : identity of the run

    Returns
    -------
    ``state``, or what the rounds after the checkpoint may have made of it: they are lost, and come again.

    Raises
    ------
    ValueError
        If the file is missing or damaged, or another run's: nobody knows what was released.
    """
    path = run_dir / _FILE
    try:
        ledger = unsealed(path.read_text(encoding="utf-8"))
        if ledger["run"] != run:
            raise ValueError(f"run: expected {run}, found {ledger['run']}")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: expected what the run has released, {error}; without it epsilon would be told too small: restore "
            "the file, or start a new run"
        ) from error
    if ledger["round"] <= completed:
        return state
    updates, sent_by_cluster = dict(ledger["updates"]), dict(ledger["sent"])
    for cluster in map(str, ledger["clusters"]):
        updates[cluster] = updates.get(cluster, 0) + 1
        sent_record = Sent(**sent_by_cluster.get(cluster, {}))
        tokens = sent_record.tokens + ledger["examples"] * ledger["length"]
        sent_by_cluster[cluster] = vars(
            replace(sent_record, tokens=tokens, longest=max(sent_record.longest, ledger["length"]))
        )
    # The lost rounds show their examples once more, each as often as there are epochs that they may touch.
    lost = (ledger["round"] - completed) * ledger["examples"]
    for cluster, sent_record in sent_by_cluster.items():
        repeats = sent_record["repeats"] + -(-lost // num_examples[int(cluster)]) + 1
        # They count as lost already: when their steps come again, these are no further repeats.
        sent_by_cluster[cluster] = {**sent_record, "repeats": repeats, "step": (0, 0)}
    return {"updates": updates, "sent": sent_by_cluster}

"""Training from Python: :func:`train` takes the road of ``collapipe run``, and gives the :class:`Run`.

>>> from flower_app import train  # doctest: +SKIP
>>> run = train({"num-rounds": 20})  # doctest: +SKIP
>>> run.metrics["bleu"], run.predict("the dog sleeps")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_stored_config, named_modules, read_sets
from flower_app.console import say as say_to_person
from flower_app.launch.launcher import Launcher
from flower_app.launch.progress import RunProgress
from flower_app.launch.single_run import continued_run, launch_run, new_run
from flower_app.prediction_file import check_pairs
from flower_app.runs.run_directory import BAD_INPUT, CONFIG, FINISHED, find_run, read_rounds, read_summary
from flower_app.saved_model import SavedModel, load_model
from flower_app.tasks.base import Score, task, task_with_probabilities

OnRound = Callable[[dict[str, Any]], None]
"""Called with each round's line of ``rounds.jsonl``, as soon as it is written."""


class TrainingFailed(RuntimeError):
    """A training that began and did not finish; what it left is in ``run``."""

    def __init__(self, run: Run, error: str) -> None:
        super().__init__(f"{run.directory}: {run.status or 'stopped'}: {error}; logs: {run.directory / 'logs'}")
        self.run = run


class Run:
    """A run directory: what was trained, how it went, and the use of its model.

    Parameters
    ----------
    run : a run directory, a name in ``runs_dir``, or ``latest``
    runs_dir : folder of the run directories
    allow_modules : modules and packages whose classes and functions the run may name

    Raises
    ------
    FileNotFoundError
        If there is no such run.
    """

    def __init__(
        self, run: str | Path = "latest", runs_dir: str | Path = "runs", allow_modules: Sequence[str] = ()
    ) -> None:
        self.directory = find_run(run, runs_dir)
        self.allow_modules = allow_modules

    def __repr__(self) -> str:
        """Name, status and metrics."""
        return f"Run({str(self.directory)!r}, status={self.status!r}, metrics={self.metrics})"

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return load_stored_config(self.directory / CONFIG, (), self.allow_modules)

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``bad-input``, ``infeasible`` or ``interrupted``; empty while it goes on."""
        return str((read_summary(self.directory) or {}).get("status", ""))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics on the test set, by name; empty before the run has finished."""
        return dict((read_summary(self.directory) or {}).get("metrics") or {})

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines of ``rounds.jsonl``: loss, validation metrics, times, bytes, plan and faults of each round."""
        return read_rounds(self.directory)[0]

    @cached_property
    def model(self) -> SavedModel:
        """The trained model, read once: ``run.model.parts`` is made of torch modules."""
        return load_model(self.directory, self.config.model.family, self.config.task.name)

    @overload
    def predict(self, inputs: str | list[dict[str, str]], proba: Literal[False] = False) -> str: ...
    @overload
    def predict(
        self,
        inputs: list[str] | tuple[str, ...] | list[tuple[str, str]] | list[list[dict[str, str]]],
        proba: Literal[False] = False,
    ) -> list[str]: ...
    @overload
    def predict(self, inputs: str, proba: Literal[True]) -> dict[str, float]: ...
    @overload
    def predict(
        self, inputs: list[str] | tuple[str, ...] | list[tuple[str, str]], proba: Literal[True]
    ) -> list[dict[str, float]]: ...
    def predict(self, inputs: Any, proba: bool = False) -> str | list[str] | dict[str, float] | list[dict[str, float]]:
        """Translate, classify, tag, fill or continue texts, or answer questions.

        Parameters
        ----------
        inputs : a text, or several; of a run with ``data.pair-column`` a list of pairs of texts; of a run of
            ``instruction`` also a conversation, a list of messages (``role``, ``content``), or several
        proba : give the probability of each label instead, by its name; of classes of texts alone

        Returns
        -------
        What the model makes of it: a text, or as many as there were. With ``proba`` a dictionary for each text.

        Raises
        ------
        ValueError
            With ``proba``, if the run's task gives no probabilities.
        """
        chosen = self.config.task
        is_one = isinstance(inputs, str) or (isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict))
        texts = [inputs] if is_one else [*inputs]
        if chosen.name != "instruction":
            check_pairs(self.config.data, texts)
        predict = task_with_probabilities(chosen).probabilities if proba else task(chosen).predict
        predictions = predict(self.model.parts, self.model.tokenizer_json, texts)
        return predictions[0] if is_one else predictions

    def evaluate(self, split: str = "test", sets: Mapping[str, Any] | None = None) -> Score:
        """Score the model on held-out data.

        Parameters
        ----------
        split : ``test`` or ``validation``
        sets : keys of the configuration to change, such as ``{"task.decode": "beam"}``
        """
        if split not in ("test", "validation"):
            raise ValueError(f"split: expected test or validation, found {split!r}")
        config = load_stored_config(self.directory / CONFIG, sets or (), self.allow_modules)
        return task(config.task).evaluator(config.data, self.model.tokenizer_json).evaluate(self.model.parts, split)

    def report(self, file: str | Path | None = None) -> Path:
        """Draw the run into one HTML page; returns the file, by default ``report.html`` in the run directory."""
        from flower_app.report.page import write_report

        return write_report([self.directory], None if file is None else Path(file))

    def export(self, folder: str | Path, adapter: bool = False) -> Path:
        """Write the model for ``AutoModelFor...`` of transformers; or its adapters alone, for ``PeftModel`` of peft."""
        from flower_app.export import export_run

        return export_run(self.directory, Path(folder), adapter=adapter).folder


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    sets: Mapping[str, Any] | None = None,
    *,
    resume: Run | str | Path | None = None,
    on_round: OnRound | None = None,
    say: Callable[[str], None] | None = None,
    launcher: Launcher | None = None,
) -> Run:
    """Train in simulation on this machine, as ``collapipe run`` does.

    Parameters
    ----------
    config : a TOML file, the name of a packaged one, or keys with values, as ``--set`` takes them
        (``{"num-rounds": 20, "optimizer": {"lr": 1e-3}}``); None: the default run
    sets : keys with values that win over ``config``
    resume : a run that stopped goes on from its last checkpoint; ``sets`` may then raise ``num-rounds`` alone
    on_round : called with each round's line; an exception that it raises stops the run. Without it the progress goes
        to standard error
    say : called with other news for the user; None: standard error, or no output with ``on_round``
    launcher : what trains; None: a simulation

    Returns
    -------
    The finished run.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is started, naming the key or file, what was found and what was expected.
    TrainingFailed
        If the run began and did not finish.
    """
    tell = say or (say_to_person if on_round is None else lambda text: None)
    if resume is not None:
        if config is not None:
            raise ValueError("resume: a run goes on with its own configuration, found config too; leave config out")
        past = resume if isinstance(resume, Run) else Run(resume)
        new = continued_run(str(past.directory), sets or (), past.allow_modules)
    elif isinstance(config, Mapping):
        new = new_run(None, read_sets(config) | read_sets(sets or {}), tell)
    else:
        new = new_run(None if config is None else str(config), sets or (), tell)
    progress = RunProgress(new.run_dir, new.config.num_rounds, quiet=on_round is not None, on_round=on_round)
    outcome = launch_run(new, tell, launcher, progress)
    run = Run(new.run_dir, allow_modules=named_modules(new.config.to_flat()))
    if outcome.status == BAD_INPUT:
        raise ValueError(outcome.error)
    if outcome.status != FINISHED:
        raise TrainingFailed(run, outcome.error)
    return run

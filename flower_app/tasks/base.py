"""What a task gives to the apps, and the registry of tasks."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = ("translation",)
DECODINGS = ("greedy", "beam")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Table ``[task]``: what is learned and how it is scored."""

    name: str = "translation"
    """One of :data:`TASKS`."""
    decode: str = "greedy"
    """How translations are searched for scoring: ``greedy`` or ``beam``."""
    beam_size: int = 4
    """Hypotheses kept by ``beam``."""
    length_penalty: float = 1.0
    """``beam``: a hypothesis of n tokens is ranked by its log-probability divided by n to this power."""
    max_new_tokens: int = 0
    """Longest translation in tokens; 0: twice the source's tokens plus ten."""
    evaluate_examples: int = 0
    """Examples of the validation set that the evaluation after a round scores; 0: all."""
    evaluate_batch_size: int = 128
    """Sentences decoded at once."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.name not in TASKS:
            raise ValueError(f"task.name: expected one of {', '.join(TASKS)}, found {self.name!r}")
        if self.decode not in DECODINGS:
            raise ValueError(f"task.decode: expected one of {', '.join(DECODINGS)}, found {self.decode!r}")
        for name, least in (
            ("beam_size", 1),
            ("length_penalty", 0),
            ("max_new_tokens", 0),
            ("evaluate_examples", 0),
            ("evaluate_batch_size", 1),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"task.{name.replace('_', '-')}: expected at least {least}, found {value}")

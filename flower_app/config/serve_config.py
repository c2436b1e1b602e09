"""Table ``[serve]`` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

SERVER, CLUSTER = "server", "cluster"
NEVER, AFTER_TRAINING, NOW, END = "never", "after-training", "now", "end"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Table ``[serve]``: answers of a trained model on the boxes of a deployment."""

    head: str = CLUSTER
    """Machine that holds the last layers while boxes answer: ``cluster``, each control unit, so that no token leaves
    the site. Boxes do not answer with those of the ``server``."""
    when: str = NEVER
    """When the boxes receive the model to answer with: ``never``, or ``after-training``, as the run's last act.
    ``collapipe serve RUN --superlink ADDRESS`` sets ``now`` and ``end``."""

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        for name, known in (("head", (SERVER, CLUSTER)), ("when", (NEVER, AFTER_TRAINING, NOW, END))):
            if getattr(self, name) not in known:
                raise ValueError(f"serve.{name}: expected one of {', '.join(known)}, found {getattr(self, name)!r}")
        if self.when in (AFTER_TRAINING, NOW) and self.head != CLUSTER:
            raise ValueError(
                f'serve.head: boxes answer with all layers at their site, found "{self.head}"; set serve.head = '
                f'"{CLUSTER}": each control unit then receives the last layers, too'
            )

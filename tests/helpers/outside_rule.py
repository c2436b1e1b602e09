"""An aggregation rule as somebody else would add it: one class, in a file that this repository does not know."""

import numpy as np

from strategies.aggregation.update_rule import UpdateRule


class SignVote(UpdateRule):
    """Moves each weight by one step, to the side that most clusters have moved it to."""

    step = 0.01
    keeps = "nothing"

    @classmethod
    def fewest(cls, config, malicious):
        """The honest ones must be the majority."""
        return 2 * malicious + 1

    def join(self, updates, weights, malicious):
        """Count each cluster once, whatever it weighs."""
        return {name: self.step * np.sign(sum(np.sign(update[name]) for update in updates)) for name in updates[0]}

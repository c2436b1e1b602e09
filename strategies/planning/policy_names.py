"""Names of the policies, for who must know them before anything that plans is imported."""

POLICIES = ("dssda", "dssda-paper", "random", "loss-only", "delay-only", "uniform", "fixed")
OPTIMAL = "+optimal"
"""After ``random``, ``loss-only`` or ``delay-only``: the segments of least pipeline time instead of uniform ones."""

"""The control unit: rounds, recovery, checkpoints and faults of one cluster."""

"""One training as the server sees it: nodes, strategy, evaluation, records, checkpoints."""

"""Training on the server's side: nodes, strategy, evaluation, records, checkpoints."""

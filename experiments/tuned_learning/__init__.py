"""Fig. 6 with a learning rate of its own for each method: rounds in one process, the search, what came of it."""

"""Run directories: what is in them, who may write, and going on from a checkpoint."""

"""Joining the clusters' encoders: the mean, robust rules, central noise and its accountant."""

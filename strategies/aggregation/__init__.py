"""Joining the clusters' encoders: the mean, robust rules, secure aggregation, central noise and its accountant."""

"""Algorithms 2 to 4 of the paper, and its power control."""

"""Strategies to compare with: the paper's baselines, Flower's own, and a user's."""

"""Deciding a round: policies, the queues over rounds, and what a decision costs."""

"""Computation of one stage: passes, optimizer, precision and memory."""

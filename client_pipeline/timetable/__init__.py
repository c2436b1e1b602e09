"""Schedules of a pipeline, their event simulator and pacing; no Ray."""

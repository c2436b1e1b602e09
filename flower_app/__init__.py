"""Composition: configuration, Flower client and server apps, tasks, command line."""

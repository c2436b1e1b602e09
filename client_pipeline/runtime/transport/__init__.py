"""Tensors between devices."""

"""Devices of a cluster and the pipeline over them."""

"""Actors that the devices of all tests share: a process that imports torch for each costs seconds."""

from dataclasses import replace

from client_pipeline.runtime.ray.arrangement import Arrangement

SHARED_ACTORS = Arrangement(device_actors=3)
"""Neighbours in a plan are in different ones, which outlive the tests that use them and end with their Ray."""


def shared_but(*devices, num_devices=3):
    """Placement of a cluster in shared actors, in which these devices alone have actors of their own."""
    placement = SHARED_ACTORS.placement(0, num_devices)
    hosts = tuple("" if device in devices else host for device, host in enumerate(placement.shared_actors))
    return replace(placement, shared_actors=hosts)

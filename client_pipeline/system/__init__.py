"""Devices and networks: scenario files, read in natural units and held in SI."""

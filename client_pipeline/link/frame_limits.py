"""Limits of a frame of the decoder's stream, its header and its numbers."""

DEFAULT_MAX_BYTES = 64 * 2**20
"""Largest frame, unless the configuration gives another limit [byte]."""
MAX_HEADER_BYTES = 64 * 2**10
MAX_DIMENSIONS = 8
LARGEST_INT = 2**63 - 1
"""Whole numbers of a header are at most as large, either way."""
PULLED_BYTES = 2**20
"""Largest piece of a file of frozen weights [byte]."""

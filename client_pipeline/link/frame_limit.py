"""How large a frame of the decoder's stream may be, unless the configuration says otherwise."""

DEFAULT_MAX_BYTES = 64 * 2**20

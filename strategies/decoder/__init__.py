"""Training the decoder on what the clusters stream: the gRPC service, the round's barrier, and its limits."""

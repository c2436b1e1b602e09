"""Times of devices, links and uploads, estimated from the control units' reports of each round."""

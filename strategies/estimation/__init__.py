"""What devices, links and uploads really take, estimated from what the control units report of each round."""

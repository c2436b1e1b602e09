"""Files of weights: which tensor is where, digests, few bits, parts on demand."""

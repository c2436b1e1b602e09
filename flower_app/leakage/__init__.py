"""``collapipe leakage``: reading tokens back from activations."""

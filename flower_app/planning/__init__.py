"""``collapipe plan``: rounds planned without training."""

"""Parts that the experiments share."""

"""``collapipe init``: a configuration for a user's files, with each guess and its reason."""

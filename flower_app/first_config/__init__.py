"""``collapipe init``: from somebody's files to a configuration that says what was guessed, and why."""

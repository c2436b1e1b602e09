"""The run's configuration: its keys, where their values come from, and what they cannot mean together."""

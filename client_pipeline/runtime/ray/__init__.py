"""Start, machines and actors of Ray."""

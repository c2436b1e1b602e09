"""What one SuperNode has: its configuration, its mods, what it keeps between rounds."""

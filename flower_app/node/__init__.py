"""Parts of one SuperNode: its configuration, its mods, and its files between rounds."""

"""Starting a run on this machine: SuperLink, simulation, sessions of several runs, and the end of their processes."""

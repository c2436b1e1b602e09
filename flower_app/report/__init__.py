"""Looking at a run: its report, trace and scalars, made from what the run wrote."""

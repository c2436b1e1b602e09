"""On real machines: certificates, the programs of each, what is wrong with them, and runs there."""

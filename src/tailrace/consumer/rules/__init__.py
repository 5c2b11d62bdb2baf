"""The rules of leases, commits and lanes, without input or output: what the simulation drives."""

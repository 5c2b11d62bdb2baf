"""One MongoDB kept equal to another."""

"""The driver's work on a micro-batch: how far it goes, and which slices of the oplogs its tasks read."""

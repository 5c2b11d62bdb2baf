"""A lake as Spark writes it, in micro-batches, and reads it."""

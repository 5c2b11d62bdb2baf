"""Denormalised views: fields of one collection carried in the documents of another, or counts and sums over them, kept
by listeners."""

"""One MongoDB kept equal to another: copy, catch-up, definitions in order, and proof."""

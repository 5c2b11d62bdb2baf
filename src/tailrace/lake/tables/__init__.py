"""Current-state tables: for each collection a Delta table that equals it at a stated cluster time."""

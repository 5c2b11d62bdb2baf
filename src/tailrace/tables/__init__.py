"""Tables of what is: for each collection a Delta table that equals it at a stated cluster time."""

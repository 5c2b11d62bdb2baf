"""The main job on one machine: a shop writes to a real MongoDB, Spark keeps its changes in a lake."""

"""The main job on a machine of one's own: a shop writes to a real MongoDB, Spark keeps its changes in a lake."""

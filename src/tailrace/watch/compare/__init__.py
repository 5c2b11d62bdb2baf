"""The server's own change stream and ours side by side, on a deployment of the user's own: ``tailrace compare``."""

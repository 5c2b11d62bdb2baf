"""The user's stages: which of them a change stream takes, and each of them compiled."""

"""The wire protocol for every driver: change streams from the engine, everything else from the server behind it."""

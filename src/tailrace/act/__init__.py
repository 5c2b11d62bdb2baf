"""Who acts on changes, once and in order: listeners, views and messages."""

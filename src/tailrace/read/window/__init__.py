"""Windows of oplogs up to a promised time, and what their changes make of documents."""

"""The nouns that go out: change events, update descriptions, resume tokens and their key strings. Bytes, no I/O."""

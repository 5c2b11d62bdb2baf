"""BSON values as the language sees them: their types, their order, their collation."""

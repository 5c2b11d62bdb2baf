"""What a Spark query asks for, and where it stands: options, filters, schema, offsets."""

"""The data source as Spark's driver sees it: options, schema, offsets, and the readers that Spark calls."""

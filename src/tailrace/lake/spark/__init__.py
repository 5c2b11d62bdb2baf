"""Change events on Apache Spark: a data source, its planning and reading, and what writes lakes and tables with it."""

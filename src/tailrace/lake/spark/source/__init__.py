"""The data source as Spark's driver sees it: the readers that Spark calls."""

"""Java, Python and the session that Spark runs with."""

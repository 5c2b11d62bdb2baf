"""One read of a deployment, for the many streams of a process."""

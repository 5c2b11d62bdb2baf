"""What programs need in addition to the data: durable files, threads, a server for metrics, and the service manager."""

"""What programs need beside the data: durable files, threads, a server for metrics, and the service manager."""

"""Acting on every change, in order, once at a time: leases, listeners, lanes, views and messages."""

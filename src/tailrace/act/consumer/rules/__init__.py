"""What leases, listeners and lanes decide: pure rules, which a thread, asyncio and the simulation drive."""

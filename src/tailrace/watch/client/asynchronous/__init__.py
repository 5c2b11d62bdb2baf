"""The same for asyncio: ``AsyncClient(...)[database][collection]`` and ``await collection.watch(...)``."""

"""What a stream does after an error, without input or output: the same for both engines, with and without asyncio."""

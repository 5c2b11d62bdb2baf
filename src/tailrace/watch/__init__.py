"""Who follows a stream: the client in the calling process, the gateway for every driver, and the comparison."""

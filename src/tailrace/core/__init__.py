"""What a change stream is: from the bytes of oplog entries to events, tokens and their order. No input or output.

The rooms stand on one another in the order in which data takes them: ``raw_bson``, ``oplog``, ``event``,
``expression``, ``plan``, ``stage``, ``pipeline``, ``kernel``, ``stream``, ``cursor``.
"""

"""What a change stream is: from the bytes of oplog entries to events, tokens and their order. No input or output.

The rooms build on one another, in the order in which data passes through them: ``raw_bson``, ``oplog``, ``event``,
``expression``, ``plan``, ``stage``, ``pipeline``, ``kernel``, ``stream``, ``cursor``.
"""

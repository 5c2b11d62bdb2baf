"""One module for each of the server's change-stream stages, named after it (semantics 11).

A stage takes a list of what the stage before it gave and returns a list; a stage that needs something from outside is a
generator of requests (``tailrace.core.plan.request``). No stage does I/O, keeps a clock or logs.
"""

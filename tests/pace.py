"""How fast background work writes during a test, and how often a test checks whether it may go on.

A thread that writes as fast as it can takes the processor from what is tested, and what it wrote has to be read
afterwards: a snapshot of 400 documents beside two such writers cost 109 s of processor, and 7 s beside two that pause,
with as many crashes and moved chunks. So whatever runs until a test tells it to stop waits between its steps: ``while
not stop.wait(BETWEEN_WRITES_S)``.
"""

from __future__ import annotations

from typing import Final

#: A hundred writes a second of each writer. A chunk of a copy takes some 10 ms.
BETWEEN_WRITES_S: Final = 0.01
#: A move of a chunk takes half a second of processor, shared among three servers.
BETWEEN_MOVES_S: Final = 0.3
#: Between two looks at whether what a test waits for is there. A look at leases is a question to the server for each of
#: them, and six test processes that ask fifty times a second keep a processor busy.
BETWEEN_LOOKS_S: Final = 0.1

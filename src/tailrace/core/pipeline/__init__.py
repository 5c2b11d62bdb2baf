"""From a plan to a running stream: the stages in a row, over one oplog, or over many and merged. No I/O."""

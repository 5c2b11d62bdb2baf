"""From parameters to running stages: options, server profiles, plan, and the stages in a row. No I/O."""

"""Named multi-process runs, and what they must agree with."""

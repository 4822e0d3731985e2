"""What happened when in this process: every room may write it, `core.observe` reads it."""

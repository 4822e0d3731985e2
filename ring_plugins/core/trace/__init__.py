"""What happened when in this process: any module records it, `core.observe` reads it."""

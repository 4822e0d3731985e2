"""What happened when: everyone writes it, `core.observe` reads it."""

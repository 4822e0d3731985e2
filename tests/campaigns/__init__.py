"""Long runs with random contents: a soak (everything public, mixed) and faults (everything that can go wrong)."""

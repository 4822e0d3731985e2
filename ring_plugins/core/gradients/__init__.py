"""Which gradients travel together, and when."""

"""The foundation: errors, configuration, logging, array types."""

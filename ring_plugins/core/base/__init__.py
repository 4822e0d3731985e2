"""What everything stands on: errors and configuration."""

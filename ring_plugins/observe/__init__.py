"""User-facing observers of a running job: BalanceMonitor, Timeline and the drift check."""

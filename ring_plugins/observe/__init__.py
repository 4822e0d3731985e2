"""What users ask of a running job: BalanceMonitor, Timeline and the drift check."""

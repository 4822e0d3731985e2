"""What users ask of a running job: step breakdown, timeline, drift check."""

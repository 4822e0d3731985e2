"""What a job does, seen while it runs: spans, steps, stalls and drift."""

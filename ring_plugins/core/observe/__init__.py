"""Services of the monitor thread that watch a job: stalls and deadlocks, step breakdown, timeline."""

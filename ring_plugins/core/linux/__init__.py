"""Linux, as far as a job needs it: shared memory, futexes, processes, network interfaces."""

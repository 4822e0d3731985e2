"""What is asked of Linux: shared memory, futexes, processes, interfaces."""

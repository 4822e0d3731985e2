"""The parts of Linux that a job needs: shared memory, futexes, processes, network interfaces."""

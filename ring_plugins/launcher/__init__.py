"""Starts jobs: on this host, on several hosts by mpirun, and from a function."""

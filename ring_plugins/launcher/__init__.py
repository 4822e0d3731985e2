"""Starting jobs: on this host, on several by mpirun, and from a function."""

"""The `ring` command: one file per subcommand, registered in `main`."""

"""The `ring` command: one file per subcommand, put together in `main`."""

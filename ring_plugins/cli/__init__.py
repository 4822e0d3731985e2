"""The `ring` command: one file a subcommand, put together in `main`."""

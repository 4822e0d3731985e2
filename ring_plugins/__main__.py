"""`python -m ring_plugins`, which is the `ring` command: for torchrun, and where it is not on PATH."""

from ring_plugins.cli.main import main

main()

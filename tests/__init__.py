"""The tests; a package so that ranks can import `tests.worker` from the repository root."""

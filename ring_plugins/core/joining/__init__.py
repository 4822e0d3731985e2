"""A process joins a job that runs, and gets the state of its training.

- `join` lets it join, and `state_transfer` gives it the state.
"""

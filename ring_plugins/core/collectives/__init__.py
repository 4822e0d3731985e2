"""Collectives: what a communicator promises, and one file an implementation."""

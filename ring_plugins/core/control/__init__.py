"""Failure detection, messages between the ranks, and waiting for other ranks."""

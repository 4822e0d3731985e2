"""Moves bytes between hosts, and chooses the network and the transport that do it."""

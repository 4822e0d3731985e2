"""Runs ranks on the nodes of a Ray cluster."""

from ring_plugins.ray.run import run

__all__ = ["run"]

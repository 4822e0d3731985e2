"""Bytes between hosts."""

"""Gradient averaging: which gradients share a bucket, and when each bucket is reduced."""

"""One file a Keras backend; only the running backend's is imported, and only it imports the framework."""

from ring_plugins.keras.backends.choice import backend

__all__ = ["backend"]

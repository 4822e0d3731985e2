"""The core: averages memory among processes. It knows no framework."""

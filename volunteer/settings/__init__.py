"""The owner's settings and the hours of work."""

"""The owner's settings and working hours."""

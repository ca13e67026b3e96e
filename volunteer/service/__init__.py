"""Service that starts with the system, updates, and removal."""

"""Merging: accepted contributions become the next version, and versions are evaluated."""

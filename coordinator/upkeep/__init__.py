"""Periodic maintenance: pruning, backups, checks."""

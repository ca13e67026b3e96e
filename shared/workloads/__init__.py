"""Workloads: models and their data behind one interface, found through entry points."""

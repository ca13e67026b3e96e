"""Scheduling: claims, leases of tasks and their renewal, and the list of tasks."""

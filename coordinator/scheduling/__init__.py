"""Scheduling: the queue, claims, leases and their renewal."""

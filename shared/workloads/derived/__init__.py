"""Workloads that are derived from an author's functions: a model, its loss and its samples."""

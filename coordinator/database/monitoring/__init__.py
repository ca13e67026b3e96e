"""Queries of monitors."""

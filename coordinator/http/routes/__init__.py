"""Handlers by subject, and the table that pairs them with their endpoints."""

"""Contributions come in: uploads and validation."""

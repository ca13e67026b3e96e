"""Intake of contributions: uploads, checks and verdicts."""

"""Audits: tasks that volunteers do again for others."""

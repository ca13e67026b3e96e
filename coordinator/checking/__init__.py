"""Checks of work: updates measured on samples of their task, and tasks done again."""

"""A GPT on text."""

"""Workload `gpt`: a GPT on text."""

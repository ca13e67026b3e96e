"""OpenAI-compatible interface to the versions of runs."""

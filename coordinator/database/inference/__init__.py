"""API keys and their metered requests."""

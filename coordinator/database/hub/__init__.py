"""Model hubs: what is published there."""

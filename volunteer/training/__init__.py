"""Thread that runs torch, and its task."""

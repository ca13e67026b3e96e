"""Thread that runs torch, and the tasks on it."""

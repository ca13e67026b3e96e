"""Play Gomoku against a version."""

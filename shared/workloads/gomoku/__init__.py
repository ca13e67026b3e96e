"""Workload `gomoku`: Gomoku by self-play, as AlphaZero learns."""

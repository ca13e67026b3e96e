"""Reinforcement learning of a language model with rewards that a program can verify."""

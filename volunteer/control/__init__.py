"""Interface for front ends: commands, queries, events, status."""

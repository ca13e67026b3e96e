"""The only door for front ends: commands, queries, events, status."""

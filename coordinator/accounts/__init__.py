"""Volunteers: registration, authentication, invites, the leaderboard and their ledger."""

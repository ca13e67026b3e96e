"""Volunteers: registration, bearer tokens, invites, the leaderboard and their ledger."""

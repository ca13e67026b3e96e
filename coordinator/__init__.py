"""Coordinator: hands out the tasks of runs, checks and merges contributions, keeps the ledger."""

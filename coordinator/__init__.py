"""Server of a run: hands out tasks, checks and merges contributions, keeps the ledger."""

"""The server of a run: hands out tasks, checks and merges what comes back, keeps the ledger."""

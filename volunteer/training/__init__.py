"""The thread that runs torch, and the task it trains."""

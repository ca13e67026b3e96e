"""The agent: claim, fetch, train, submit; one loop a device."""

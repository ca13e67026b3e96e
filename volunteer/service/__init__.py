"""Start with the system, and leave no trace when uninstalled."""

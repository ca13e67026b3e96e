"""What runs by itself now and then: pruning, backups, checks."""

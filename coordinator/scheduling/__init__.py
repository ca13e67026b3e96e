"""Which worker does which task: the queue, claims, leases and their renewal."""

"""Storage on the volunteer's disk: blobs, leases, outbox, residuals."""

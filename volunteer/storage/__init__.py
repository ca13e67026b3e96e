"""What the volunteer keeps on disk: blobs, leases, outbox, residuals."""

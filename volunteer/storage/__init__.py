"""Storage on the volunteer's disk: blobs, leases, outbox, receipts, own data."""

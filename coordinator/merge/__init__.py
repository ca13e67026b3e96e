"""The pure mathematics of a merge: aggregation, server optimisers, plans, shards. No store."""

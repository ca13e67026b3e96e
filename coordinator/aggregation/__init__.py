"""The pure mathematics of a merge: aggregation, server optimisers, shards. No store."""

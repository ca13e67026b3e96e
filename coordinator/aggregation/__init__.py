"""Mathematics of a merge: aggregation rules, server optimisers, shards. No store, no database."""

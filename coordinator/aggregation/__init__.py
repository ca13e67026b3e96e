"""Mathematics of a merge: aggregation, server optimisers, shards. Pure: no store, no database."""

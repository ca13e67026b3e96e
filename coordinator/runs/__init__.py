"""Runs: their definition, versions, datasets, samples and exports."""

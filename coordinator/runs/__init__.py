"""Runs: their definition, phases, versions, datasets, samples and exports."""

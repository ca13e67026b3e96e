"""Input of training: the building and reading of datasets, tokenizers, and the order of a pass."""

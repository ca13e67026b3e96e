"""Datasets, tokenizers and the order of a pass: the input of training."""

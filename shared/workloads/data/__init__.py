"""Datasets, tokenizers and the order of a pass: what workloads train on."""

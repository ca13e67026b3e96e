"""Answers of a version to prompts: engines, keys, prices, and the record of use."""

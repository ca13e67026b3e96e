"""Answers of a version to prompts: engines, keys, prices, metering."""

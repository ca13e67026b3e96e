"""Generation of text with a version: sampling, streaming, and many sequences at once."""

"""Signatures, Merkle trees, and proofs of work."""

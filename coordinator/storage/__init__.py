"""Blobs on disk and in S3-compatible stores, and how much space is left."""

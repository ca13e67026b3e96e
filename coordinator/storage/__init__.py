"""Storage of blobs on disk and in S3-compatible stores, and the space that is left."""

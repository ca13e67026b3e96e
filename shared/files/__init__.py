"""Files on the disk: reading, writing, and names of local data."""

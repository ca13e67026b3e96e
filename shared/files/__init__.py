"""Files on the disk: opening, writing, deleting, TOML, and paths that a person names."""

"""The steps of the first screen, one file each."""

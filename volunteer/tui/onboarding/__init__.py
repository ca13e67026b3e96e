"""The first minutes: join, name, limits, benchmark, run, ready."""

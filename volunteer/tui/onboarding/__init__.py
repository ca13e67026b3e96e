"""The first start: join, name, limits, benchmark, run, ready."""

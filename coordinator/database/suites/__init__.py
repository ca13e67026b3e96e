"""Task suites of runs."""

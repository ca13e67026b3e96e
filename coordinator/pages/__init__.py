"""Public web pages of the runs: rendered here, readable without JavaScript."""

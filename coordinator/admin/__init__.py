"""The organiser's commands as data, run here or over HTTP."""

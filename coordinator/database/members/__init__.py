"""Data that members keep: its numbers and passes, and the losses measured on it."""

"""Tables by subject, all in one metadata."""

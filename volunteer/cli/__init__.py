"""The volunteer's command line; each command imports what is heavy when it runs."""

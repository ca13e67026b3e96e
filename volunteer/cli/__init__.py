"""Volunteer's command line; each command imports heavy modules when it runs."""

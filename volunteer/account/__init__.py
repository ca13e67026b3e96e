"""Accounts of the volunteer: profiles, joining, public runs."""

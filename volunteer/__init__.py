"""Volunteer's program: claims tasks, trains, submits, and shows its work."""

"""Program of a volunteer: claims tasks, trains, submits, and shows its work."""

"""The volunteer's program: claims tasks, trains, submits, and shows what it does."""

"""Public web page of a coordinator: its runs, its volunteers, and how to join."""

"""The public web page of a coordinator: what is trained, by whom, and how to join."""

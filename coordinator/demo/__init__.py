"""`coordinator demo`: a real server and real volunteers on this machine, and a summary."""

"""How a program of ours is installed, starts, and answers slips on its command line."""

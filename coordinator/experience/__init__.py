"""Experience of actors: verified when it comes in, replayed and, where versions play, rated."""

"""Experience of actors: verified on submission, replayed and, where versions play, rated."""

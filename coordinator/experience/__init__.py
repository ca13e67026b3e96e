"""Experience of actors comes in, is verified, replayed and, where versions play, rated."""

"""A DCGAN on images."""

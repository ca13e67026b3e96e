"""Workload `dcgan`: a DCGAN on images."""

"""Tensors as bytes: strict safetensors frames, quantised blocks, updates with their hash and
statistics.
"""

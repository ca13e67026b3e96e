"""Tensors as bytes: strict safetensors frames, quantised blocks, measured updates."""

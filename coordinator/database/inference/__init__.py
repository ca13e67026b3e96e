"""Keys of the OpenAI-compatible interface, and the record of their use."""

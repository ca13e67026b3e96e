"""Agent: claims, fetches, trains and submits, with one loop a device."""

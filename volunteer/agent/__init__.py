"""Agent: claims, fetches, trains and submits, with one loop per device."""

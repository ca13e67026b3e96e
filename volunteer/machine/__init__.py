"""This computer: devices, benchmark, sensors, who uses it, and what the owner allows."""

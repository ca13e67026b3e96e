"""This computer: devices, benchmark, sensors, presence of a person, and the owner's limits."""

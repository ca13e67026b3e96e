"""Host of the volunteer: devices, benchmark, sensors, the owner's presence and limits."""

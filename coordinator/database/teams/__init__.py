"""Teams of volunteers."""

"""Terminal capabilities: driver, colours, ASCII."""

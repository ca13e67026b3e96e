"""Terminal capabilities: driver, stylesheet, ASCII."""

"""What a terminal can show: driver, stylesheet, ASCII."""

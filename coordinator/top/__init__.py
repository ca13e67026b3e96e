"""Monitor of the organiser: the overview as tables and facts, as text or on a screen."""

"""The organiser's monitor: one picture as tables and facts, as text or as a screen."""

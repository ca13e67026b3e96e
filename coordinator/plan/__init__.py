"""How the updates of a run are merged: presets, phases and their checks. Pure."""

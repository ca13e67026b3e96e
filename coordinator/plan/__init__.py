"""Plans: how the updates of a run are merged, with presets, phases and their checks. Pure."""

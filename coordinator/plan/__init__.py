"""Plans: how the updates of a run are merged, with presets and their checks. Pure."""

"""The step loop of a task, its optimizer, its learning-rate schedule and its devices."""

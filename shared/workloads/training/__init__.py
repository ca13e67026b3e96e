"""Training of a task: the step loop, its optimizer, its learning-rate schedule and its devices."""

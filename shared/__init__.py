"""Code of both sides: wire messages, errors, tensors, workloads. No database, no HTTP, no UI."""

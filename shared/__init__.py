"""What both sides share: wire messages, errors, tensors, workloads. No database, no HTTP, no UI."""

"""The trainer and its checkpoints."""

"""Real engines, each in its own environment (tools/engines.py), and the slow reference that they are held to."""

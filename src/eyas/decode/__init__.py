"""Acceptance: replayed from the store, or decoded with the target."""

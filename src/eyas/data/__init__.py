"""Conversations, chat template, on-policy answers, split and preview."""

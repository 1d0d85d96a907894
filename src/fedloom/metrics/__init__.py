"""Scores of clients and what a run cost."""

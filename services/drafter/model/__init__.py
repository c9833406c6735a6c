"""Draft model families."""

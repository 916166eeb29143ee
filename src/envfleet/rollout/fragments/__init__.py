"""Segments whose policy acts in the workers: one message per worker and segment instead of one per step."""

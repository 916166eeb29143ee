"""Backends: where workers live and how they are woken."""

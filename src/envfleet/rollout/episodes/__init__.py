"""Whole episodes: their record, and the loop that collects them."""

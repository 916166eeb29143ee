"""Attacks on fleets, checked row by row against a model. `python -m tests.chaos --minutes 10` runs them at random."""

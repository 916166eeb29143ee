"""Run many reinforcement-learning environments at once, on one small supervised core."""

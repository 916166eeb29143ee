"""Helpers that all packages use: trees of arrays, files, locks, JSON, threads, seeds, the machine."""

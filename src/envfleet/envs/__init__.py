"""Environments that ship with envfleet."""

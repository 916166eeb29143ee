"""Environments of many agents in a slot."""

"""Rollouts over environment clients: thread, async and process executors."""

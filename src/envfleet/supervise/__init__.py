"""Supervision: deadlines, restarts, quarantine, orphan protection, stack dumps."""

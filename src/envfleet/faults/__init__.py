"""What went wrong: a failure as a worker saw it, a fault as the parent records it."""

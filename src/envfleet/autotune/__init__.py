"""`backend="auto"`: probe an environment, look at the machine, choose."""

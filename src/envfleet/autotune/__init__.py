"""`backend="auto"`: probe an environment, check the machine, choose."""

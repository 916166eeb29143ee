"""One slot: the layout of its row, the memory it is in, and the life that steps its environment."""

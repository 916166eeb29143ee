"""Worker processes: the keeper that starts them, the channel to them, the memory they share, their loop."""

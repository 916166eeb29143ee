"""Networks and policies: Markov, memory and memory-Markov agents, in PyTorch and as a NumPy mirror for rollouts."""

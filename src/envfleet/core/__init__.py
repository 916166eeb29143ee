"""The fleet: send, recv, step, the batch they give, the supervisor, and `make`."""

"""The benchmark of envfleet: `python -m bench`."""

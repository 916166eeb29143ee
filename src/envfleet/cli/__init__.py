"""The `envfleet` command, one file per command."""

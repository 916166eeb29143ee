"""The `envfleet` command, one file a command."""

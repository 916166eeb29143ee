"""The peers: those that live in the same venv (`local`), and those that need one of their own (`remote`)."""

"""Tasks: where they are drawn from, who gets which, and curricula. Nothing here steps an environment."""

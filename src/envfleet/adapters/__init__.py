"""Views of a fleet for other libraries."""

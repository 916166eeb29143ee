"""[T, B] segments: their record, and the loop that collects them."""

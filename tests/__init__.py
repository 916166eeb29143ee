"""The tests. A package, so that `tests.support` is found from every test in one way."""

"""Environments written in C or C++: the header, the libraries that hold them, and their Python face."""

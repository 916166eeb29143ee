"""Everything is in pyproject.toml; this file is where the compiled core is declared."""

from setuptools import setup

setup()

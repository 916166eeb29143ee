"""Datasets on disk: Parquet directories that survive a kill, and Minari."""

"""Episode and segment records, executors, collector, statistics, ledger, datasets."""

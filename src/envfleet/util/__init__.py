"""Small things that everything else uses: trees of arrays, files, locks, JSON, threads, seeds, the machine."""

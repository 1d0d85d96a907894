"""Speed and memory, measured as ratios within one run: `make bench`."""

"""Data: what there is (datasets), who holds it (partition), and what it is used for (split)."""

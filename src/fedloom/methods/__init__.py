"""The methods: one short file each, with the declaration, its source and its defaults."""

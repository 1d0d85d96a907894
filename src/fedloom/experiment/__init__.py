"""Experiments: config, runner, run store, comparison."""

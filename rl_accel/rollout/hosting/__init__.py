"""Plays the rounds of tail batching for any framework whose workers can run, cancel and report single responses."""

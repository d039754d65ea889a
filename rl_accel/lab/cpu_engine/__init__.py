"""A small generation engine on CPU, for runs of verl and slime on a laptop. The engine imports neither verl nor slime."""

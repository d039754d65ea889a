"""The warm process that forks for each execution, watches the child, and leaves nothing of it behind.

It runs as a script, ``python <this folder> <number of a socket>``, and imports the standard library only, so that a fork has what
programs usually import and nothing of the trainer; so of its files the trainer imports ``cleanup`` alone.
"""

"""A run: build, step, evaluate, measure. Start reading at loop.py."""

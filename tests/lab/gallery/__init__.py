"""Broken programs, and what must be said of each: run as cells in the pool (test_gallery.py) and as scripts (test_scripts.py)."""

"""Engines side by side; building the pinned one."""

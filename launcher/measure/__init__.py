"""LOOK at it: is what runs what was planned."""

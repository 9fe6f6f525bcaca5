"""Pieces of gpu_acceptance.py."""

"""Conversations that the demo pack learns from, and those it is judged by: written by our own code, from a seed."""

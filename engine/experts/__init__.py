"""Experts that do not all fit a card: which of them lie in its memory, where the others are read from, and how prompts
bring these over in time."""

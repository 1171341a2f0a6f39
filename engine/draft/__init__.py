"""Drafts: where proposals come from, how many of them stay, and whether they pay. Pure; nothing is computed here."""

"""Frozen weights in 4 or 8 bits: linear layers over them, and bases that are loaded or stored that way."""

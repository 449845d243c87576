"""A training service: a server that speaks the Tinker API over a `Session`; many adapters on one
base.
"""

"""Checkpoints: sharded, checksummed, published by one rename, resumed exactly in any layout;
docs/checkpoints.md.
"""

"""Checkpoints: sharded, checksummed, published by one rename, and resumed exactly in any layout. docs/checkpoints.md
has the format."""

"""Safetensors files, read and written a slice at a time."""

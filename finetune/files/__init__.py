"""What is on disk whole or not at all: durable files, JSON Lines, safetensors a slice at a time,
downloads.
"""

"""What an export can be written as beside safetensors, and what other programs than transformers read of it."""

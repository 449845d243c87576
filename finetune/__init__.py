"""Fine-tune Llama-style models on Hugging Face Accelerate: same losses on every layout, no silent data fault, verified
exports."""

__version__ = "0.1.0"

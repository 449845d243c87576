"""The output head in chunks of tokens: cross entropy, log-probabilities and divergences without whole logits."""

"""A trained model in use: a conversation in the terminal, answers for scripts, benchmarks by lm-eval, each beside its
base."""

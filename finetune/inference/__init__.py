"""A trained model in use: chat in the terminal, answers for scripts, benchmarks by lm-eval, each
beside its base.
"""

"""A trained model in use: a conversation in the terminal, answers for scripts, and the base model beside it."""

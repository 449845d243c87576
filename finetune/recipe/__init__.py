"""Recipes: every key with its type, default and help, and a strict reader that reports every mistake with its line."""

"""Training data, from files to batches.

rows (`sources`, `readers`) -> messages, a prompt with its completion, or text (`formats`), two of
them where answers are compared (`preferences`) -> text with the spans that are trained on
(`render`, `spans`) -> token ids and labels (`tokenize`) -> documents on disk (`token_store`) ->
examples of at most max_length tokens (`examples`) -> packed rows (`packing`) -> batches
(`batches`). `prepare` runs all of it for a recipe, `inspect` shows the result.
"""

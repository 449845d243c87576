"""Training data, from files to batches.

rows (`sources`, `readers`) -> messages, a prompt with its completion, or text (`formats`), two of them where answers
are
compared (`preferences`, `ratings`, `groups`) -> text with the spans that are
trained on (`chat`) -> token ids and labels (`tokenize`) -> documents on disk (`token_store`, `token_cache`) -> examples
of at most max_length tokens (`examples`, `mixture`) -> packed rows (`packing`, `sampler`) -> micro-batches (`collate`)
-> batches (`batches`, `streaming`).
`prepare` runs all of it for a recipe, `inspect` shows the result.
"""

"""From files to batches, every token accounted for.

files -> rows (`sources`) -> `Conversation`, `Completion` or `Text` (`formats`) -> `Rendered` text with its trained
spans (`chat`) -> tokens and labels in a memory-mapped folder (`tokens`, `store`) -> `Examples` of at most max_length
tokens (`examples`) -> rows of an epoch (`packing`, `order`) -> `StepBatch` (`batches`). `prepare` walks the line.
"""

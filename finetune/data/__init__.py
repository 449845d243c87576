"""Training data, from files to batches.

1. `sources` and `readers` read rows from files.
2. `formats` reads a row as messages, as a prompt with its completion, or as text. `preferences`
   reads the rows of methods that compare answers, which have several of these.
3. `render` and `spans` make text of them, with the spans that are trained on.
4. `tokenize` makes token ids and labels of the text, and `token_store` keeps the documents on disk.
5. `examples` cuts documents into examples of at most max_length tokens.
6. `packing` fills rows with examples, and makes the `batches` of each rank.

`prepare` runs these steps for a recipe; `inspect` shows the result.
"""

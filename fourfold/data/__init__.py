"""From text to batches: corpora, tokenizers, the order of samples, the loader."""

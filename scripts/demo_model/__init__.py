"""The embedded demo model: its grammar, tokenizer, training, export and evaluation."""

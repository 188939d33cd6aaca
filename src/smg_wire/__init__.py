"""What both ends of the wire share: errors, settings, observability, tokenizer bundles."""

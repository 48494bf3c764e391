"""What `infer chat` is made of: where lines come from, what is done with them, and how answers are shown."""

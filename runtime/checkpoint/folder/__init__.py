"""Checkpoint folders as Hugging Face's libraries write them, in GGUF's words: safetensors, config.json, tokenizer."""

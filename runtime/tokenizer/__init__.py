"""Text to ids and back: vocabularies, incremental decoding, chat templates."""

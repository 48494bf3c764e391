"""From a model file to tokens: checkpoints, tokenizers, models, the paged KV cache, the engine."""

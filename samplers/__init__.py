"""From logits to a token: pure functions over a batch of rows, composed once per request."""

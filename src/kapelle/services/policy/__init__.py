"""The policy server: a trained team behind OpenAI-compatible chat completion routes."""

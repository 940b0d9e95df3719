"""The policy server, which makes a trained team available through OpenAI-compatible chat completion routes."""

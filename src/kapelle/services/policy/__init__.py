"""The policy server: a trained team behind the routes of OpenAI's chat completions."""

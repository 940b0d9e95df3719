"""Language models: the tiny embedded model, loading, conversations as tokens, the LoRA bank and heads."""

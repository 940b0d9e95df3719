"""Language models: the embedded model, model loading, conversion of conversations to tokens, the LoRA bank and output heads."""

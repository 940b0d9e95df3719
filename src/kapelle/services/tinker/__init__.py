"""Serves the protocol of Tinker: several clients train and sample their own LoRA adapters on one base model, in mixed batches."""

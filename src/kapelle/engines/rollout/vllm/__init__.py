"""The rollout engine that samples with vLLM: in this process, or on a server that is given or started."""

KEY_ENV = "VLLM_API_KEY"
"""Environment variable with a server's key."""

KV_GIB = 4.0
"""GiB for the KV cache of each base model where no device has memory of its own."""

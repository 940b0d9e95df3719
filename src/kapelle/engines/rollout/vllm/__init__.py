"""The rollout engine that samples with vLLM, in this process or on a server."""

KEY_ENV = "VLLM_API_KEY"
"""Environment variable that contains a server's key."""

KV_GIB = 4.0
"""GiB for the KV cache of each base model on a CPU."""

"""The rollout engine that samples with vLLM, either in this process or on a server."""

KEY_ENV = "VLLM_API_KEY"
"""The name of the environment variable that contains the API key of a vLLM server."""

KV_GIB = 4.0
"""The size of the KV cache of each base model on a CPU, in GiB."""

"""The rollout engine that samples with vLLM: in this process, or on a server that is given or started."""

"""The run directory, which is the interface: what is written, how it is read back, who may write."""

"""The train engine that keeps a part of each base in every process (FSDP2)."""

"""What is said over the wire: code that `tools/generate_wire.py` makes of `proto/`. Needs the extra `serve`."""

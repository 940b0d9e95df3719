"""The one loop and what stands around it: what is recorded, saved, resumed and shown."""

"""The train engine on one device."""

"""The environment server (see `docs/environment_server.md`), and a server for OpenEnv clients."""

"""The environment server (`docs/environment_server.md`), and a server for clients of OpenEnv."""

"""The environment server: worlds over gRPC. `docs/environment_server.md` has the contract."""

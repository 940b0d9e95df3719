"""gRPC servers: one check before every method, a health service, caps, and an orderly end.

A service implements `GrpcService` and is served by `GrpcServer`. These modules import grpcio, an extra; so they are imported where
a server is made, after `installed.check_installed`.
"""

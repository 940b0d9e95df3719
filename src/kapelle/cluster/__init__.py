"""A run on a cluster of Ray (`kapelle train … --launch ray`): the placement of processes, and their messages.

    launcher.py     the command, its driver, and the actor that holds each rank
    placement.py    the bundles of resources on which each rank may start actors
    ray_workers.py  rollout workers: actors that roll out whole groups of episodes for a rank
    sampling.py     sampling workers: actors that hold the models of some agents
    scoring.py      scoring workers: actors that hold the models used only for scoring
    worlds.py       environment workers: actors that hold episode states
    actors.py       the part of Ray that all of these use; the only module that imports Ray

Messages are bytes (JSON, safetensors), so that no object is pickled.
"""

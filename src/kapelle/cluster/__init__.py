"""A run on a cluster of Ray (`kapelle train … --launch ray`): what is placed where, and the messages in between.

    launcher.py     the command, the driver that it starts, and the actor that holds each rank
    placement.py    which bundles of resources each rank may start actors on
    ray_workers.py  rollout workers: actors that play whole groups of episodes for a rank
    worlds.py       environment workers: actors that hold worlds
    actors.py       the part of Ray that all of these use; the only module that imports it

Messages are bytes (JSON, safetensors), so that none of our objects is pickled.
"""

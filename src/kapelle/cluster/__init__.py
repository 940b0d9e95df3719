"""Run training on a Ray cluster (`kapelle train … --launch ray`): this package places the processes and exchanges their messages.

    launcher.py     The command, the driver, and the actor that holds each rank.
    placement.py    The bundles of resources on which each rank may start actors.
    ray_workers.py  Rollout workers, which are actors that roll out whole groups of episodes for a rank.
    sampling.py     Sampling workers, which are actors that hold the models of some agents.
    scoring.py      Scoring workers, which are actors that hold the models used only for scoring.
    worlds.py       Environment workers, which are actors that hold episode states.
    actors.py       The interface to Ray that all of these modules use. This is the only module that imports Ray.

Messages consist of bytes (JSON or safetensors), so that no object is pickled.
"""

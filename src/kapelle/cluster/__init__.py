"""A run on a cluster of Ray (`kapelle train … --launch ray`): who is placed where, and what is said between them.

    launcher.py     the command itself: starts the driver, passes signals on, leaves nothing behind
    driver.py       the process that speaks to Ray: places actors, starts the ranks, shows what they print
    ranks.py        an actor that holds the process of one rank of the trainer
    ray_workers.py  rollout workers as a rank sees them: one rollout engine
    player.py       an actor that plays whole groups of episodes
    actors.py       Ray, as far as all of these use it; the one module that imports it

Messages are bytes (JSON, safetensors), so that nothing of ours is pickled.
"""

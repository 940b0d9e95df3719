"""The engines that sample completions and the engines that train policies."""

"""Engines that sample and engines that train."""

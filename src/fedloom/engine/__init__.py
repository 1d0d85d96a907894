"""Engines: the same local work on many clients, with the same results."""

from fedloom.engine.base import Block, Engine, Order, Scored, Setting, Trained
from fedloom.engine.choose import make_engine
from fedloom.engine.serial import Serial
from fedloom.engine.worker import Diverged, diverged

__all__ = [
    "Block",
    "Diverged",
    "Engine",
    "Order",
    "Scored",
    "Serial",
    "Setting",
    "Trained",
    "diverged",
    "make_engine",
]

"""Engines: the same local work on many clients, with the same results."""

from fedloom.engine.base import Block, Engine, Scored, Setting, Task, Trained
from fedloom.engine.choose import make_engine
from fedloom.engine.serial import Serial
from fedloom.engine.worker import Diverged, diverged

__all__ = [
    "Block",
    "Diverged",
    "Engine",
    "Scored",
    "Serial",
    "Setting",
    "Task",
    "Trained",
    "diverged",
    "make_engine",
]

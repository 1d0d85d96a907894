"""Engines: the same local work on many clients."""

from fedloom.engine.base import Engine, Scored, Setting, Task, Trained
from fedloom.engine.serial import Serial

__all__ = ["Engine", "Scored", "Serial", "Setting", "Task", "Trained"]

"""Which part of the model a client trains: the whole, or a sub-model given by its columns."""

from fedloom.select.base import Ask, Select, Selection, Whole

__all__ = ["Ask", "Select", "Selection", "Whole"]

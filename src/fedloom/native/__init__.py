"""Native kernels for small networks on CPUs, where torch's call overhead exceeds the arithmetic.

`kernels.cpp` is compiled when fedloom is installed, if there is a compiler; without it everything
runs through torch. `plan.py` turns a module into operations that the kernels know, `net.py` runs
them. Nothing here knows of clients, rules or methods.
"""

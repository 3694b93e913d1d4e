"""What `capsnet bench` measures, a file a subject: speed and memory, each variant in a process of its own.

`network.py` compares a network's variants, `routing.py` the algorithms, `grid.py` the layers on grids and large images,
`data.py` training from memory and from the cache, and `processes.py` training in several processes.
"""

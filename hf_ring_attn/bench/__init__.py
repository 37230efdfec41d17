"""``hf-ring-attn bench``: speed, memory and traffic of attention in a ring, against one device and other packages.

In one process it simulates a rank of a ring without communication; under torchrun it runs the ring::

    hf-ring-attn bench --tokens 32768 131072
    torchrun --nproc_per_node 8 -m hf_ring_attn bench --tokens 32768 131072 --against ulysses torch-cp --save results
"""

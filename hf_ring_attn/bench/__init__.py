"""``hf-ring-attn bench``: speed, memory and traffic of attention in a ring, beside one device and beside others.

In one process it plays a rank of a ring whose messages have all arrived; under torchrun it runs the ring::

    hf-ring-attn bench --tokens 32768 131072
    torchrun --nproc_per_node 8 -m hf_ring_attn bench --tokens 32768 131072 --against ulysses torch-cp --save results
"""

"""The last import of the fork server: what it imported is left out of the ranks' garbage collections.

Trainer collects at each start, which takes 0.3 s over all that transformers imports, in every new rank.
"""

import gc

gc.collect()
gc.freeze()

"""``python -m hf_ring_attn``: the command `hf-ring-attn`."""

import sys

from .cli import main

sys.exit(main())

#!/usr/bin/env bash
# YaRN from 32K to 128K tokens: bash recipes/extend-context/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" extend-context gpu_8_fsdp2 \
    --tokenizer Qwen/Qwen3-8B-Base --length 131072 --pack wrapped --eval-every 20 -- "$@"

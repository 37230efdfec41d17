#!/usr/bin/env bash
# Full fine-tuning on rows of 1,048,576 tokens: bash recipes/full-1m/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" full-1m gpu_8_fsdp2 \
    --tokenizer Qwen/Qwen3-8B --length 1048576 --pack wrapped -- "$@"

#!/usr/bin/env bash
# Conversations packed into rows of 32,768 tokens: bash recipes/packed-chat/run.sh [--toy]; GPUS, TEXTS and other arguments: recipes/launch.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch.sh" packed-chat gpu_8_fsdp2 \
    --tokenizer Qwen/Qwen3-8B --length 32768 --pack bfd -- "$@"

#!/usr/bin/env bash
# slime on a node of eight GPUs, with rl-accel: MODEL_DIR, DATA and SLIME_ROOT are yours. Only the last line of the call is ours.
set -euo pipefail

rl-accel slime-config --enable gae,advantages,tail_batching > rl_accel.yaml
rl-accel slime-config --check rl_accel.yaml

source "${SLIME_ROOT}/scripts/models/qwen3-4B.sh"  # MODEL_ARGS

ray start --head --num-gpus 8 --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json='{"env_vars": {"PYTHONPATH": "/root/Megatron-LM/", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
  -- python3 "${SLIME_ROOT}/train.py" \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \
  "${MODEL_ARGS[@]}" \
  --hf-checkpoint "${MODEL_DIR}/Qwen3-4B" --ref-load "${MODEL_DIR}/Qwen3-4B_torch_dist" \
  --load "${MODEL_DIR}/run" --save "${MODEL_DIR}/run" --save-interval 20 \
  --prompt-data "${DATA}/dapo-math-17k.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
  --rm-type deepscaler \
  --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1 \
  --global-batch-size 256 \
  --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 \
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 \
  --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
  --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 \
  --custom-config-path "${PWD}/rl_accel.yaml"

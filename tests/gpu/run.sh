#!/bin/bash
# Everything that needs a card, in four calls of at most ten minutes each:
#
#     OUT=some/folder bash tests/gpu/run.sh A    # versions; the checks at one rank, and at two on one card; streams
#     OUT=some/folder bash tests/gpu/run.sh B    # against DDP: weights, graphs, a killed peer, memory, cost on the host
#     OUT=some/folder bash tests/gpu/run.sh C    # steps of whole models at one rank; Lightning; MPS if there is one
#     OUT=some/folder bash tests/gpu/run.sh D    # compiled models; Keras; weights in memory that NCCL has registered
#
# Without an argument it makes all four calls. Every part has its time, and one that fails stops no other. What is found
# is written to $OUT/facts.jsonl at once, and the output of each part to $OUT/PART.log. DRY=1 only prints the parts.
cd "$(dirname "$0")/../.." || exit 1
if [ $# = 0 ]; then
  OUT=${OUT:-$(mktemp -d)}; export OUT
  for call in A B C D; do bash tests/gpu/run.sh $call; done
  echo "found: $OUT/facts.jsonl"; exit
fi
case $1 in A | B | C | D) ;; *) sed -n '2,11s/^# \{0,1\}//p' tests/gpu/run.sh; exit 2 ;; esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
OUT=${OUT:-$(mktemp -d)}; export OUT; mkdir -p "$OUT"
python=${PYTHON:-python3}

if [ -z "$DRY" ] && ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
  echo "not run here: torch sees no CUDA GPU; with one, call $1 would run:"; DRY=1
fi

part() { # seconds, name, command
  local limit=$1 name=$2 began=$SECONDS status; shift 2
  if [ -n "$DRY" ]; then echo "$name ($limit s): $*"; return; fi
  echo "== $name"
  timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1; status=$?
  echo "{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - began))}" | tee -a "$OUT/facts.jsonl"
  grep -h '^FACT\|Error\|passed\|failed\|skipped\|ms a step\|ring / ' "$OUT/$name.log" | tail -16
}

versions() {
  nvidia-smi; nvidia-smi topo -m; command -v nvidia-cuda-mps-control
  "$python" - <<'PYTHON'
import json, os, torch
torch.cuda.init()
from ring_plugins.core.gpu import load_driver, load_nccl
found = {"check": "versions", "card": torch.cuda.get_device_name(0), "torch": torch.__version__,
         "ours": str(load_nccl()), "torch's NCCL": torch.cuda.nccl.version(), "bus": load_driver().bus_id(0)}
print("FACT", json.dumps(found))
open(os.path.join(os.environ["OUT"], "facts.jsonl"), "a").write(json.dumps(found) + "\n")
PYTHON
}
export -f versions; export python

case $1 in
A)
  part 60 versions bash -c versions
  part 150 one_rank "$python" -m pytest -m gpu -q tests/torch/test_gpu.py -k "1- or on_one_card"
  part 290 two_ranks "$python" -m pytest -m gpu -q tests/torch/test_gpu.py -k "2-"
  part 60 two_streams "$python" tests/gpu/two_streams.py
  ;;
B)
  part 150 equals_ddp "$python" tests/gpu/equals_ddp.py
  part 60 graph_at_exit "$python" tests/gpu/graph_at_exit.py
  part 60 killed_peer "$python" tests/gpu/killed_peer.py
  part 90 peak_memory "$python" tests/gpu/peak_memory.py
  part 90 host_nonblocking "$python" tests/gpu/host_cost.py
  NCCL_COMM_BLOCKING=0 part 90 host_nonblocking "$python" tests/gpu/host_cost.py
  ;;
C)
  part 240 steps "$python" benchmarks/gpu_step.py --seconds 15 --trace "$OUT/step.json"
  part 60 lightning_1 env TEST_RANKS=1 "$python" tests/gpu/lightning_fit.py
  part 60 lightning_2 "$python" tests/gpu/lightning_fit.py
  if [ -n "$DRY" ] || command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps; mkdir -p "$OUT/mps"
    if [ -n "$DRY" ] || nvidia-cuda-mps-control -d 2>"$OUT/mps.log"; then
      part 60 mps_equals_ddp "$python" tests/gpu/equals_ddp.py
      part 60 mps_host "$python" tests/gpu/host_cost.py
      [ -n "$DRY" ] || echo quit | nvidia-cuda-mps-control
    fi
  fi
  ;;
D)
  part 150 compiled "$python" tests/gpu/compiled_models.py
  part 90 keras_on_torch "$python" tests/gpu/keras_on_torch.py
  part 90 keras_on_tensorflow "$python" -m pytest -m gpu -q -rs tests/keras/backends/test_tensorflow_device.py
  part 110 keras_on_jax "$python" -m pytest -m gpu -q -rs tests/keras/backends/test_jax_device.py
  RING_NCCL_REGISTER=1 part 150 registered_equals_ddp "$python" tests/gpu/equals_ddp.py
  ;;
esac

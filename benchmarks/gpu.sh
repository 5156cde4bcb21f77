#!/usr/bin/env bash
# What is measured on a GPU: benchmarks/gpu.sh OUT MODEL CONVERSATIONS [PART…] [SETTING=VALUE…]
#
#   OUT            a folder, for results and logs; with run/prepare of a run that was stopped once all answers were
#                  there, no server is started to write them
#   MODEL          SmolLM2-135M-Instruct
#   CONVERSATIONS  a ShareGPT file
#   PART           checks, step, capture, kimi, rehearse, served; all of them, in this order, if none is named
#   SETTING        of gpu.yaml's recipe
#
# One thing at a time, each with a log. A part that fails does not keep the others from running; OUT/ended has the
# exit status and the seconds of each. Wants vLLM, and `pip install '.[dev]'`; PYTHON names another python3.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$1" && out=$(realpath "$1") model=$(realpath "$2") conversations=$(realpath "$3") && shift 3 || exit 2
python=${PYTHON:-python3} kimi=tests/probe/configs/kimi-k2.5.json port=8077
parts=() settings=()
for word in "$@"; do if [[ $word == *=* ]]; then settings+=("$word"); else parts+=("$word"); fi; done
[ ${#parts[@]} -gt 0 ] || parts=(checks step capture kimi rehearse served)

checks() { $python -m pytest -q -p no:cacheprovider tests/draft/kernel_checks.py tests/draft/test_fast_cuda.py; }

step() {
    $python benchmarks/train_step.py --workload full --tokens 4096 8192 16384 --steps 7 3 --output "$out/train_step.json" &&
    $python benchmarks/train_step.py --workload full --tokens 8192 16384 --steps 7 3 --top1 --output "$out/train_step_top1.json" &&
    $python benchmarks/train_step.py --workload small --tokens 8192 --steps 7 3 --output "$out/train_step_small.json"
}

capture() {
    $python benchmarks/capture.py "$model" --sequences 1024 --start-in-parallel --folder "$out/capture" --output "$out/capture.json"
}

kimi() {
    $python benchmarks/capture.py $kimi --layers 7 --one-at-a-time --parts plain native --repeats 2 --sequences 128 \
        --gpu-memory-utilization 0.9 --kv-cache-memory-bytes 8000000000 --folder "$out/kimi" --output "$out/capture_kimi.json"
}

rehearse() {
    mkdir -p "$out/kimi-k2.5" && cp $kimi "$out/kimi-k2.5/config.json" &&
    $python -m draftsmith rehearse "$out/kimi-k2.5" --json > "$out/rehearse_kimi.json"
}

answers() {
    local status server
    setsid $python -m vllm.entrypoints.openai.api_server --model "$model" --port $port --gpu-memory-utilization 0.3 > "$out/answers.log" 2>&1 &
    server=$!
    until no_proxy='*' $python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null; do
        kill -0 $server 2>/dev/null || { echo "the server of the answers ended: $out/answers.log"; return 1; }
        sleep 1
    done
    $python -m draftsmith probe benchmarks/gpu.yaml "$@" && $python -m draftsmith prepare benchmarks/gpu.yaml "$@"
    status=$?
    kill -TERM -- -$server
    wait $server
    return $status
}

served() {
    local all=("target.model=$model" "prepare.sources.0.path=$conversations" "run_dir=$out/run"
        "prepare.regenerate.url=http://127.0.0.1:$port/v1" ${settings[@]+"${settings[@]}"})
    [ -e "$out/run/prepare/answers.jsonl" ] || answers "${all[@]}" || return 1
    $python -m draftsmith run benchmarks/gpu.yaml "${all[@]}"
}

for part in "${parts[@]}"; do
    begin=$SECONDS
    $part > "$out/$part.log" 2>&1
    echo "$part: exit $?, $((SECONDS - begin)) s" | tee -a "$out/ended"
done

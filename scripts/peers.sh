#!/usr/bin/env bash
# `make peers`: the engines that the benchmark compares with, each in an environment of its own under .peers/.
exec bash "$(dirname "${BASH_SOURCE[0]}")/peers/setup.sh" "$@"

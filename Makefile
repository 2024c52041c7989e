# Each target does its own set-up. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The rooms that are typed strictly; they import no ROS.
PURE_ROOMS := $(addprefix pi05_ros/,errors.py model checkpoint engine policy robot server client)
PYTEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: help setup build test soak lint demo clean

help:  ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1 \t/' | expand -t 16
	@echo "Variables: PYTEST_ARGS (make test), DEMO_ARGS (make demo), and those of scripts/setup.sh --help."

setup:  ## prepare .venv and build the package; afterwards: source ./env.sh
	@scripts/setup.sh

build: setup  ## the same: set-up builds what has changed
	@:

lint: setup  ## ruff, and mypy on the rooms without ROS
	@source ./env.sh && ruff check . && mypy $(PURE_ROOMS)

test: setup lint  ## lint, then all tests, e.g. make test PYTEST_ARGS="test/model -x"
	@source ./env.sh && PI05_ROS_TEST_NODES=$${PI05_ROS_ACCEPT_ISAACSIM:-1} python -m pytest $(PYTEST_ARGS)

soak: setup  ## the tests of load, stalls and pings in full length, and 64 clients for a minute
	@source ./env.sh && PI05_ROS_SOAK=1 python -m pytest test/server/test_faults.py $(PYTEST_ARGS)
	@source ./env.sh && python benchmarks/serve_load.py --clients 64 --seconds 60 --strict

demo: setup  ## the policy on a simulated ALOHA; writes demo_report/
	@source ./env.sh && python -m pi05_ros.tools.demo $(DEMO_ARGS)

clean:  ## remove what was built and reported; .venv stays (rm -r .venv to start afresh)
	rm -rf build install log demo_report .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pi05_ros test scripts launch -name __pycache__ -prune -exec rm -rf {} +

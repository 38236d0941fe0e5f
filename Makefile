# The commands of the house; `make help` lists them.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernel test-newer test-criu test-package check bench package torture

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what building and testing need, where it is missing
	@scripts/setup

demo: setup ## Back up a running machine, kill it, let it go on; a disk: damage it, bring it back; move a machine
	@scripts/demo

test: setup ## Everything that must hold before a change is merged
	@scripts/test all

test-kernel: setup ## What needs another kernel: real OpenZFS and LVM with their volumes, in a guest
	@scripts/test-kernel

test-newer: setup ## Machines under the libvirt and QEMU of a newer Debian, in a root folder of their own
	@scripts/test-newer

test-criu: ## Back from a snapshot with memory 50 times, with a real runc and CRIU, which are not installed
	@scripts/test-criu

check: ## The quick loop: fmt, tidy, clippy, licences, unit tests
	@scripts/test quick

bench: setup ## Measure against other programs, side by side
	@bench/run
	@bench/machines
	@bench/archives
	@bench/clones

package: ## A Debian package and a tarball, in build/package
	@scripts/package $(if $(PROGRAM),--program $(PROGRAM))

test-package: package ## Install, upgrade and remove the package in a clean Debian 12
	@scripts/test-package

torture: setup ## The long tests: crashes, damage, random histories (release build), fuzzing
	@PATH="$$PATH:$$HOME/.cargo/bin:/usr/sbin:/sbin" cargo test --locked --workspace --release -- --ignored
	@scripts/test-criu || [ $$? = 77 ]
	@scripts/fuzz --optional

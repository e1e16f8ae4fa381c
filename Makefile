# A thin face on `cargo xtask`, which holds all the logic.
.PHONY: help demo test bench lint

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Boot real guests on thin volumes, interrupt-driven and polled, and clone one under load
	cargo xtask demo

test: ## Everything that must pass before a commit: lint, tests, guests, fuzzing, tiny benches
	cargo xtask test

bench: ## Run the experiments, for instance: make bench ARGS="local-block --tiny"
	cargo xtask bench $(ARGS)

lint: ## Formatting, clippy and the house rules
	cargo xtask lint

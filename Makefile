# Shortcuts for `cargo xtask`, which holds all the logic but that of `make install`: installing needs
# neither Rust nor the network.
.PHONY: help demo demo-net demo-remote test bench lint build install uninstall

PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
BINDIR ?= $(PREFIX)/bin
UNITDIR ?= $(PREFIX)/lib/systemd/system
DOCDIR ?= $(PREFIX)/share/doc/sidecore
DATADIR ?= $(PREFIX)/share/sidecore
# Files to copy into guests.
GUESTDIR ?= $(PREFIX)/lib/sidecore/guest
CARGO_TARGET_DIR ?= target
# The directory where `make build` puts the programs.
BUILD ?= $(CARGO_TARGET_DIR)/release

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Boot real guests on thin volumes, interrupt-driven and polled, and clone one under load
	cargo xtask demo $(ARGS)

demo-net: ## Two guests on a switch: ping, files, VLANs, a claimed address, a rule
	cargo xtask demo-net $(ARGS)

demo-remote: ## Two hosts' guests on disks of a third host, over a bad network (root)
	cargo xtask demo-remote $(ARGS)

# The programs are those that ship but for the optimisation of whole programs, which takes a core up
# to two minutes for each of 30 programs.
test: ## Everything that must pass before a commit: lint, tests, guests, fuzzing, tiny benches
	CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo xtask test

bench: ## Run the experiments, for instance: make bench ARGS="local-block --tiny"
	cargo xtask bench $(ARGS)

lint: ## Formatting, clippy and the rules of this project
	cargo xtask lint

build: ## Build the daemon, the command line tool and the guests' program in release mode
	cargo build --release --package sidecored --package sidecore
	cargo rustc --release --package sidecore-guest-tune -- -C target-feature=+crt-static -C strip=debuginfo

install: ## Copy programs, unit and documentation below DESTDIR and PREFIX (/usr/local)
	@for program in sidecored sidecore sidecore-guest-tune; do \
	    test -x "$(BUILD)/$$program" || \
	        { echo "make: there is no $(BUILD)/$$program to install; run \`make build\` first" >&2; exit 1; }; \
	done
	install -d "$(DESTDIR)$(BINDIR)" "$(DESTDIR)$(UNITDIR)" "$(DESTDIR)$(DOCDIR)" \
	    "$(DESTDIR)$(DATADIR)" "$(DESTDIR)$(GUESTDIR)"
	install -m 755 "$(BUILD)/sidecored" "$(BUILD)/sidecore" "$(DESTDIR)$(BINDIR)"
	install -m 755 "$(BUILD)/sidecore-guest-tune" "$(DESTDIR)$(GUESTDIR)"
	install -m 644 packaging/sidecore-guest-tune.service "$(DESTDIR)$(GUESTDIR)"
	sed -e 's|@bindir@|$(BINDIR)|' -e 's|@sysconfdir@|$(SYSCONFDIR)|' -e 's|@docdir@|$(DOCDIR)|' \
	    packaging/sidecored.service > "$(DESTDIR)$(UNITDIR)/sidecored.service"
	chmod 644 "$(DESTDIR)$(UNITDIR)/sidecored.service"
	install -m 644 packaging/wireshark/sidecore-vrio.lua "$(DESTDIR)$(DATADIR)"
	install -m 644 README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md CHANGELOG.md LICENSE \
	    "$(DESTDIR)$(DOCDIR)"
	find docs -type f -exec install -D -m 644 {} "$(DESTDIR)$(DOCDIR)/{}" \;

uninstall: ## Remove what `make install` copied
	rm -f "$(DESTDIR)$(BINDIR)/sidecored" "$(DESTDIR)$(BINDIR)/sidecore" "$(DESTDIR)$(UNITDIR)/sidecored.service"
	rm -rf "$(DESTDIR)$(DOCDIR)" "$(DESTDIR)$(DATADIR)" "$(DESTDIR)$(GUESTDIR)"

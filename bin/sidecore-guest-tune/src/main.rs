//! `sidecore-guest-tune`: a program for Linux guests, which sets them up to poll their NICs and
//! disks as the sidecores of their host do (FAST'12, section 4). See docs/guest-tune.md.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod boot;
mod disk;
mod memory;
mod napi;
mod netlink;
mod nic;
mod report;
mod system;
#[cfg(test)]
mod tests;
mod tree;

use crate::boot::Next;
use crate::napi::Kernel;
use crate::nic::Nics;
use crate::system::System;
use crate::tree::Tree;
use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand};
use std::io::Write as _;
use std::process::ExitCode;

/// Sets a Linux guest up to poll its NICs and disks.
#[derive(Parser)]
#[command(name = "sidecore-guest-tune", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Change the settings that differ. Former values are kept for `undo`.
    Apply(Apply),
    /// Show each setting: in force, after a reboot, off, or impossible here, with the reason.
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Restore former values, and remove the files for the next boot.
    Undo {
        /// Leave the files for the next boot.
        #[arg(long)]
        keep_next_boot: bool,
    },
}

#[derive(Args)]
struct Apply {
    /// How NICs are polled.
    #[arg(long, value_enum, default_value_t)]
    nics: Nics,
    /// The number of queues of each disk that are polled after the next boot.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    poll_queues: u32,
    /// Let NICs of virtio_net send without interrupts after the next boot. Sockets then do not
    /// wait for a full ring.
    #[arg(long)]
    no_transmit_interrupts: bool,
    /// Write the kernel's command line, too: idle=poll, and poll queues of drivers that are built
    /// in.
    #[arg(long)]
    next_boot: bool,
    /// Reserve so many huge pages at the next boot.
    #[arg(long, default_value_t = 0, requires = "next_boot")]
    huge_pages: u32,
    /// Leave the files for the next boot as they are.
    #[arg(
        long,
        conflicts_with_all = ["poll_queues", "no_transmit_interrupts", "next_boot"]
    )]
    keep_next_boot: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sidecore-guest-tune: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut system = System { tree: Tree::new("/"), napis: Box::new(Kernel::open()?) };
    let text = match &arguments.command {
        Command::Status { json: true } => serde_json::to_string_pretty(&system.status()?)? + "\n",
        Command::Status { json: false } => report::table(&system.status()?),
        Command::Apply(apply) => {
            ensure_root()?;
            let next = Next {
                poll_queues: apply.poll_queues,
                is_quiet: apply.no_transmit_interrupts,
                has_command_line: apply.next_boot,
                huge_pages: apply.huge_pages,
            };
            let next = (!apply.keep_next_boot).then_some(&next);
            sentences(&system.apply(apply.nics, next)?)
        }
        Command::Undo { keep_next_boot } => {
            ensure_root()?;
            let mut said = system.undo()?;
            if !keep_next_boot {
                said.extend(boot::remove(&system.tree)?);
            }
            sentences(&said)
        }
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn ensure_root() -> Result<()> {
    let is_root = rustix::process::geteuid().is_root();
    ensure!(is_root, "settings of the kernel can be changed by root only: run it by sudo");
    Ok(())
}

fn sentences(said: &[String]) -> String {
    match said {
        [] => "nothing to change\n".to_owned(),
        said => said.join("\n") + "\n",
    }
}
